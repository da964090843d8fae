//! Environment variables that are settings, and variables with a mistyped name of a setting.

use super::schema;

/// The prefix of environment variables that are settings, and the separator of the parts of their paths.
pub(super) const PREFIX: &str = "PRECIS__";
pub(super) const SEPARATOR: &str = "__";

/// Variables with this prefix are ours or resemble ours.
const SHORT_PREFIX: &str = "PRECIS_";

/// Returns a warning for each variable that resembles a setting and is ignored, such as
/// `PRECIS_CONSOLIDATION__THRESHOLD`. It is no error, because other programs use the prefix, too: Kubernetes sets
/// `PRECIS_SERVER_PORT` for a service of the name `precis-server`.
pub(super) fn ignored_variables<'e>(names: impl Iterator<Item = &'e str>) -> Vec<String> {
    let warning = |name: &'e str| {
        let rest = name.strip_prefix(SHORT_PREFIX).filter(|_| !name.starts_with(PREFIX))?;
        let written = letters(rest);
        // The name of a provider, a model or a pool is unknown, so its settings can't be proposed.
        let settings = schema::patterns().filter(|path| !path.parts().contains(&"*"));
        let settings: Vec<_> = settings.map(|path| (letters(&path.parts().concat()), path)).collect();
        let closest = schema::closest(&written, settings.iter().map(|(letters, _)| letters.clone()));
        let setting = settings.iter().find(|(letters, _)| Some(letters) == closest.as_ref());
        let ignored = format!("the environment variable {name} is not a setting and is ignored");
        if let Some((_, path)) = setting {
            let variable = format!("{PREFIX}{}", path.parts().join(SEPARATOR).to_uppercase());
            return Some(format!("{ignored}: did you mean {variable}?"));
        }
        let section = rest.split('_').next().unwrap_or_default().to_lowercase();
        let is_section = schema::patterns().any(|path| path.parts().first() == Some(&section.as_str()));
        is_section.then(|| {
            format!(
                "{ignored}: settings begin with {PREFIX}, and {SEPARATOR} separates the parts of their names"
            )
        })
    };
    let mut warnings: Vec<_> = names.filter_map(warning).collect();
    warnings.sort();
    warnings
}

/// Returns the name without separators and in lower case.
fn letters(name: &str) -> String {
    name.chars().filter(|c| *c != '_').flat_map(char::to_lowercase).collect()
}
