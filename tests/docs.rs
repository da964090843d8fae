//! Checks the documentation: links resolve, and the tests, files and names that it mentions exist. Its commands are run by
//! `tests/process/documented_commands.rs`.
#![cfg(test)]

use std::path::{Path, PathBuf};

#[test]
fn guarantees_name_existing_tests() {
    let sources: String = ["src", "tests"].iter().flat_map(|folder| rust_files(Path::new(folder))).collect();
    let code_spans = include_str!("../docs/guarantees.md").split('`').skip(1).step_by(2);
    let is_test_name = |span: &&str| {
        span.matches('_').count() >= 2
            && span.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let names: Vec<&str> = code_spans.filter(is_test_name).collect();
    assert!(names.len() > 30, "{names:?}");
    let missing: Vec<_> = names.iter().filter(|name| !sources.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty(), "docs/guarantees.md names tests that do not exist: {missing:#?}");
}

#[test]
fn relative_links_and_anchors_resolve() {
    let mut broken = Vec::new();
    for path in documents() {
        let folder = path.parent().expect("a folder");
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { folder.join(file) };
            let has_anchor = || std::fs::read_to_string(&target).is_ok_and(|text| has_heading(&text, anchor));
            if !link.contains("://") && !(target.exists() && (anchor.is_empty() || has_anchor())) {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Each page is a chapter of the site, and each chapter is a page: mdBook builds no page that its summary lacks.
#[test]
fn every_page_is_a_chapter_of_the_site() {
    let summary = include_str!("../docs/SUMMARY.md");
    let pages = documents().into_iter().filter_map(|path| Some(path.strip_prefix("docs").ok()?.to_owned()));
    let missing: Vec<PathBuf> = pages
        .filter(|page| {
            page != Path::new("SUMMARY.md") && !summary.contains(&format!("]({})", page.display()))
        })
        .collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
}

/// Run by `scripts/site`.
#[test]
#[ignore = "needs the site that scripts/site builds"]
fn links_of_the_site_resolve() {
    let site = PathBuf::from(std::env::var_os("PRECIS_SITE").expect("PRECIS_SITE is the folder of the site"));
    let pages: Vec<PathBuf> = ["docs", "docs/decisions"]
        .iter()
        .flat_map(|folder| std::fs::read_dir(site.join(folder)).expect("a folder"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "html"))
        .collect();
    let (mut links, mut broken) = (0, Vec::new());
    // A server shows the page for missing addresses at any of them, so its links begin with a slash.
    for page in pages.iter().filter(|page| !page.ends_with("404.html")) {
        let html = std::fs::read_to_string(page).expect("UTF-8");
        for attribute in [" href=\"", " src=\""] {
            for link in html.split(attribute).skip(1).filter_map(|rest| rest.split('"').next()) {
                let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
                let target =
                    if file.is_empty() { page.clone() } else { page.parent().expect("a folder").join(file) };
                let has_anchor = || {
                    std::fs::read_to_string(&target)
                        .is_ok_and(|html| html.contains(&format!(" id=\"{anchor}\"")))
                };
                links += 1;
                if !link.contains("://") && !(target.is_file() && (anchor.is_empty() || has_anchor())) {
                    broken.push(format!("{}: {link}", page.display()));
                }
            }
        }
    }
    assert!(pages.len() > 30 && links > 1000, "{} pages, {links} links", pages.len());
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Returns `true` if the document has a heading with this anchor, formed by GitHub's rule.
fn has_heading(markdown: &str, anchor: &str) -> bool {
    let is_part = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let headings = markdown.lines().filter(|line| line.starts_with('#'));
    let titles = headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
    titles
        .map(|title| title.chars().filter(is_part).collect::<String>().replace(' ', "-"))
        .any(|id| id == anchor)
}

#[test]
fn named_files_and_names_of_the_glossary_exist() {
    let mut missing = Vec::new();
    for path in documents() {
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        let spans = text.split('`').skip(1).step_by(2);
        let is_path = |span: &&str| {
            ["src/", "tests/", "migrations/"].iter().any(|folder| span.starts_with(folder))
                && !span.contains(['<', '{', ' ', '*'])
        };
        let absent = spans.filter(is_path).filter(|span| !Path::new(span).exists());
        missing.extend(absent.map(|span| format!("{}: {span}", path.display())));
    }
    let sources: String = ["src", "tests"].iter().flat_map(|folder| rust_files(Path::new(folder))).collect();
    let rows = include_str!("../docs/glossary.md").lines().filter(|line| line.starts_with("| "));
    let cells = rows.filter_map(|row| row.trim_end_matches(" |").split(" | ").nth(2));
    for name in cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).filter(|name| !name.contains('/')) {
        let last = name.rsplit("::").next().and_then(|name| name.split(':').next()).unwrap_or(name);
        if !sources.contains(last) {
            missing.push(format!("docs/glossary.md: {name}"));
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_limit_is_documented() {
    let document = include_str!("../docs/limits.md");
    let example = include_str!("../precis.example.toml");
    let (_, section) = example.split_once("\n[limits]\n").expect("the section");
    let settings = section.lines().take_while(|line| !line.is_empty());
    let names: Vec<&str> = settings.filter_map(|line| line.split(" = ").next()).collect();
    assert!(names.len() > 10, "{names:?}");
    let is_documented = |name: &&str| document.contains(&format!("`limits.{name}`"));
    let missing: Vec<&&str> = names.iter().filter(|name| !is_documented(name)).collect();
    assert!(missing.is_empty(), "docs/limits.md lacks {missing:?}");
}

/// Returns the paths of README.md, CONTRIBUTING.md and all documents in docs/.
fn documents() -> Vec<PathBuf> {
    let of = |folder: &str| {
        let entries =
            std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
        entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect::<Vec<_>>()
    };
    let top = ["README.md", "CONTRIBUTING.md"].map(PathBuf::from);
    top.into_iter().chain(of("docs")).chain(of("docs/decisions")).collect()
}

/// Returns the text of all Rust files in a folder and its subfolders.
fn rust_files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = entries.partition(|path| path.is_dir());
    let files = files.iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let mut texts: Vec<String> = files.map(|path| std::fs::read_to_string(path).expect("UTF-8")).collect();
    texts.extend(folders.iter().flat_map(|folder| rust_files(folder)));
    texts
}
