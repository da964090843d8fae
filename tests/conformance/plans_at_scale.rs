//! Prints the query plans of all calls on Postgres at a hundred million messages; `scripts/plans` runs it.
//!
//! The database holds a part of these messages. The rest is simulated: the files of tables and indexes are extended by holes,
//! because the planner asks for the real size of a file, and the numbers of rows in the catalogue grow in proportion.

use crate::postgres_plans::{DIALECT, connect_once};
use crate::sql::Sql;
use crate::support::backend::Backend;
use crate::support::store_calls::{self, CALLS, Filled};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const MESSAGES: f64 = 1e8;
/// N of the data of the calls: one session has 921,600 messages, and there are 102,400 sessions with one message.
const SIZE: i64 = 102_400;
/// Sessions of 20 messages. A fifth of them belongs to a thousand tenants, the others to the tenant of the calls.
const SESSIONS: i64 = 450_000;

const BULK: &str = "\
    INSERT INTO sessions (tenant_id, session_id, user_id, metadata, last_seq, tokens, created_at, updated_at, activity_hour)
    SELECT CASE WHEN n % 5 = 0 THEN 'b' || n % 1000 ELSE 'default' END, 'bulk' || n, 'user' || n % (SESSIONS / 5), '{}', 20,
        1500, t, t, floor(extract(epoch FROM t) / 3600)
    FROM (SELECT n, now() - interval '1 day' - n * interval '1 year' / SESSIONS AS t FROM generate_series(1, SESSIONS) AS n)
        AS times;
    INSERT INTO messages (tenant_id, session_id, seq, role, tokens, message, created_at)
    SELECT tenant_id, session_id, seq, CASE WHEN seq % 2 = 1 THEN 'user' ELSE 'assistant' END, 75,
        '{\"role\":\"user\",\"content\":\"' || repeat(md5(session_id || seq), 9) || '\"}', created_at
    FROM sessions, generate_series(1, 20) AS seq WHERE session_id LIKE 'bulk%';
    INSERT INTO revisions (tenant_id, session_id, revision, kind, cursor_seq, summary, summary_words, summary_tokens, added,
        created_at)
    SELECT tenant_id, session_id, 1, 'consolidation', 10, repeat('a summary ', 50), 100, 100, 'x', created_at
    FROM sessions WHERE session_id LIKE 'bulk%0';
    INSERT INTO idempotency_keys (tenant_id, session_id, key, fingerprint, first_seq, last_seq, created_at)
    SELECT tenant_id, session_id, gen_random_uuid(), sha256('x'), 1, 2, created_at
    FROM sessions WHERE session_id LIKE 'bulk%0';
    INSERT INTO memories (tenant_id, user_id, version, content, words, tokens, created_at)
    SELECT 'default', 'user' || n, 1, repeat('memory ', 50), 50, 50, now() FROM generate_series(0, SESSIONS / 5) AS n";

/// The planner's estimate of the number of distinct values would be that of the sample.
const PREPARE: &str = "\
    ALTER TABLE messages ALTER session_id SET (n_distinct = -0.05);
    ALTER TABLE search_terms ALTER session_id SET (n_distinct = -0.05)";

/// Adds the messages of the bulk sessions to the index, the oldest ones first, each with eight of 50,000 words. Words with small numbers
/// are frequent. The terms of filters are as those of the service.
const INDEX: &str = "\
    INSERT INTO search_terms (tenant_id, session_id, seq, micros, terms)
    SELECT tenant_id, session_id, seq, floor(extract(epoch FROM m.created_at) * 1000000),
        array_to_tsvector(ARRAY[':r' || role, pg_temp.term('t', tenant_id), pg_temp.term('u', tenant_id || E'\\n' || user_id),
            pg_temp.term('s', tenant_id || E'\\n' || session_id)]
            || ARRAY(SELECT 'w' || floor(50000 * random() ^ 3) FROM generate_series(1, 8) WHERE seq > 0))
    FROM messages AS m JOIN sessions USING (tenant_id, session_id) WHERE session_id LIKE 'bulk%'
    ORDER BY m.created_at, session_id, seq";

/// The term of an id in the index.
const TERM: &str = "\
    CREATE FUNCTION pg_temp.term(kind text, id text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
        SELECT ':' || kind || left(encode(sha256(convert_to(id, 'UTF8')), 'hex'), 16)
    $$";

/// Extends the files of a relation to a number of blocks. A file has at most 131,072 blocks, and only the last one fewer.
const EXTEND: &str = "\
    COPY (SELECT 1) TO PROGRAM $$
        file=FILE blocks=BLOCKS part=
        while [ $blocks -gt 131072 ]; do
            truncate -s 1073741824 $file${part:+.$part}
            blocks=$((blocks - 131072)) part=$((part + 1))
        done
        truncate -s $((blocks * 8192)) $file${part:+.$part}
    $$";

const SCALE: &str = "\
    UPDATE pg_class SET reltuples = reltuples * FACTOR, relpages = ceil(relpages * FACTOR),
        relallvisible = floor(relallvisible * FACTOR)
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i') AND reltuples > 0";

const FILES: &str = "\
    SELECT pg_relation_filepath(oid) || ' ' || relpages FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i') AND reltuples > 0";

/// Logs the plans of all statements to the client.
const EXPLAIN: &str = "\
    ALTER DATABASE DATABASE_NAME SET session_preload_libraries = auto_explain;
    ALTER DATABASE DATABASE_NAME SET auto_explain.log_min_duration = 0;
    ALTER DATABASE DATABASE_NAME SET auto_explain.log_level = notice;
    ALTER DATABASE DATABASE_NAME SET auto_explain.log_format = json;
    ALTER DATABASE DATABASE_NAME SET auto_explain.log_analyze = on;
    ALTER DATABASE DATABASE_NAME SET auto_explain.log_timing = off;
    ALTER DATABASE DATABASE_NAME SET auto_explain.log_buffers = on;
    ALTER DATABASE DATABASE_NAME SET auto_explain.log_nested_statements = NESTED";

/// The notices of the server.
#[derive(Clone, Debug, Default)]
struct Notices(Arc<Mutex<Vec<u8>>>);

impl io::Write for Notices {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Notices {
    /// Returns the plans since the last call, each with the duration of its statement in milliseconds.
    fn take(&self) -> Vec<(f64, Value)> {
        let text = String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap();
        let messages = text.lines().filter_map(|line| {
            let event: Value = serde_json::from_str(line).unwrap();
            let message = event["fields"]["message"].as_str()?.strip_prefix("duration: ")?.to_owned();
            let (duration, plan) = message.split_once(" ms  plan:\n")?;
            Some((duration.parse().unwrap(), serde_json::from_str::<Value>(plan).unwrap()))
        });
        messages.collect()
    }
}

/// The plans of a call.
#[derive(Clone, Debug, Default, PartialEq)]
struct Plans {
    /// Indexes, and tables that are read as a whole.
    reads: BTreeSet<String>,
    cost: f64,
    expected_rows: f64,
    rows: f64,
}

impl Plans {
    fn add(&mut self, node: &Value) {
        let number = |name: &str| node[name].as_f64().unwrap_or(0.0);
        if number("Actual Loops") == 0.0 {
            return;
        }
        self.cost = self.cost.max(number("Total Cost"));
        let node_type = node["Node Type"].as_str().unwrap();
        if node_type.starts_with("Gather") {
            self.reads.insert("parallel workers".to_owned());
        }
        if let Some(index) = node["Index Name"].as_str() {
            self.reads.insert(index.to_owned());
        } else if node_type == "Seq Scan" {
            self.reads.insert(format!("all of {}", node["Relation Name"].as_str().unwrap()));
        }
        if node_type.contains("Scan") && (node["Index Name"].is_string() || node["Relation Name"].is_string())
        {
            self.expected_rows = self.expected_rows.max(number("Plan Rows"));
            self.rows = self.rows.max(number("Actual Rows") * number("Actual Loops"));
        }
        for child in node["Plans"].as_array().into_iter().flatten() {
            self.add(child);
        }
    }
}

impl fmt::Display for Plans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reads = self.reads.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        write!(f, "{reads} | {:.0} | {:.0} / {:.0}", self.cost, self.expected_rows, self.rows)
    }
}

#[tokio::test]
#[ignore = "takes 15 minutes and 15 GB of disk"]
async fn print_plans() {
    let notices = Notices::default();
    let writer = notices.clone();
    let subscriber = tracing_subscriber::fmt().json().with_writer(move || writer.clone());
    let _default = tracing::subscriber::set_default(subscriber.finish());
    let backend = Backend::postgres().await;
    let mut sql = Sql::on(&backend).await;
    let began = Instant::now();
    sql.run(crate::postgres_plans::DISABLE_AUTOVACUUM).await;
    sql.run(PREPARE).await;
    for statement in BULK.replace("SESSIONS", &SESSIONS.to_string()).split(';') {
        sql.run(statement).await;
    }
    sql.run(TERM).await;
    sql.run(INDEX).await;
    sql.run(&store_calls::fill(DIALECT, SIZE)).await;
    sql.run("VACUUM (FREEZE, ANALYZE)").await;
    let messages = sql.number("SELECT count(*) FROM messages").await;
    println!("{messages} messages, {:.0?}", began.elapsed());
    print_table(&backend, &mut sql, &notices).await;
    let factor = MESSAGES / f64::from(i32::try_from(messages).unwrap());
    for file in sql.texts(FILES).await {
        let (file, pages) = file.split_once(' ').unwrap();
        let blocks = (pages.parse::<f64>().unwrap() * factor).ceil();
        sql.run(&EXTEND.replace("FILE", file).replace("BLOCKS", &blocks.to_string())).await;
    }
    sql.run(&SCALE.replace("FACTOR", &factor.to_string())).await;
    println!("\n{MESSAGES} messages, simulated");
    print_table(&backend, &mut sql, &notices).await;
}

/// Prints a line for each call. A second line follows if the seventh execution has another plan than the first: Postgres may use
/// a generic plan from the sixth execution on.
async fn print_table(backend: &Backend, sql: &mut Sql, notices: &Notices) {
    let database = sql.texts("SELECT current_database()::text").await.remove(0);
    println!(
        "| call | reads | cost | expected / read rows | ms | blocks |\n| --- | --- | --- | --- | --- | --- |"
    );
    let filled = Filled::new(SIZE);
    for (what, expected) in CALLS {
        let explain = EXPLAIN.replace("DATABASE_NAME", &database);
        sql.run(&explain.replace("NESTED", "on")).await;
        let store = connect_once(&backend.url()).await;
        let mut plans = Vec::new();
        for _ in 0..7 {
            notices.take();
            assert_eq!(store_calls::call(&store, &filled, what).await, *expected, "{what}");
            let mut of_call = Plans::default();
            notices.take().iter().for_each(|(_, plan)| of_call.add(&plan["Plan"]));
            plans.push(of_call);
        }
        store.close().await;
        sql.run(&explain.replace("NESTED", "off")).await;
        let store = connect_once(&backend.url()).await;
        let (mut duration, mut blocks) = (0.0, 0.0);
        for _ in 0..3 {
            notices.take();
            store_calls::call(&store, &filled, what).await;
            (duration, blocks) = (0.0, 0.0);
            for (of_statement, plan) in notices.take() {
                duration += of_statement;
                let read = |name: &str| plan["Plan"][name].as_f64().unwrap_or(0.0);
                blocks += read("Shared Hit Blocks") + read("Shared Read Blocks");
            }
        }
        store.close().await;
        println!("| {what} | {} | {duration:.2} | {blocks} |", plans[0]);
        if plans[6].reads != plans[0].reads {
            println!("| {what}, seventh | {} | | |", plans[6]);
        }
    }
}
