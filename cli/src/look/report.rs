//! What was found in one thing, as text and as JSON.

use serde_json::{Map, Value, json};

use crate::show::{self, Table};

/// What was found in a file, an object or a handle.
#[derive(Debug)]
pub struct Report {
    /// The file or object.
    what: String,
    kind: &'static str,
    facts: Vec<(&'static str, Value)>,
    lists: Vec<List>,
    /// What is odd, but no damage.
    notes: Vec<String>,
    damages: Vec<Damage>,
    /// How much was held against a checksum, in bytes.
    verified_bytes: u64,
}

/// Where something is damaged, and in which way.
#[derive(Debug)]
struct Damage {
    /// Where the damaged piece begins, in bytes from the start of the file or object; where that has a meaning.
    offset: Option<u64>,
    what: String,
}

/// Things of one kind, a row each.
#[derive(Debug)]
struct List {
    name: &'static str,
    columns: &'static [&'static str],
    rows: Vec<Vec<Value>>,
}

/// In which form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// Facts and tables.
    Contents,
    /// Whether all is intact.
    Verdict,
}

impl Report {
    pub fn new(what: impl Into<String>, kind: &'static str) -> Report {
        let (facts, lists, notes, damages) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Report { what: what.into(), kind, facts, lists, notes, damages, verified_bytes: 0 }
    }

    pub fn fact(&mut self, name: &'static str, value: impl Into<Value>) {
        self.facts.push((name, value.into()));
    }

    pub fn list(&mut self, name: &'static str, columns: &'static [&'static str], rows: Vec<Vec<Value>>) {
        debug_assert!(rows.iter().all(|row| row.len() == columns.len()));
        self.lists.push(List { name, columns, rows });
    }

    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    pub fn damage(&mut self, offset: Option<u64>, what: impl ToString) {
        self.damages.push(Damage { offset, what: what.to_string() });
    }

    pub fn verified(&mut self, bytes: u64) {
        self.verified_bytes += bytes;
    }

    pub fn is_damaged(&self) -> bool {
        !self.damages.is_empty()
    }

    pub fn to_json(&self, show: Show) -> Value {
        let damages: Vec<Value> = self
            .damages
            .iter()
            .map(|Damage { offset, what }| json!({ "offset": offset, "what": what }))
            .collect();
        let mut map = Map::new();
        map.insert("path".to_owned(), self.what.clone().into());
        map.insert("kind".to_owned(), self.kind.into());
        if show == Show::Verdict {
            map.insert("intact".to_owned(), (!self.is_damaged()).into());
            map.insert("verified_bytes".to_owned(), self.verified_bytes.into());
        } else {
            for (name, value) in &self.facts {
                map.insert(name.replace(' ', "_"), value.clone());
            }
            for List { name, columns, rows } in &self.lists {
                let rows = rows.iter().map(|row| {
                    let cells = columns.iter().zip(row);
                    Value::Object(
                        cells.map(|(column, cell)| (column.replace(' ', "_"), cell.clone())).collect(),
                    )
                });
                map.insert(name.replace(' ', "_"), rows.collect());
            }
        }
        map.insert("notes".to_owned(), self.notes.clone().into());
        map.insert("damages".to_owned(), damages.into());
        Value::Object(map)
    }

    pub fn to_text(&self, show: Show) -> String {
        let mut text = match show {
            Show::Contents => format!("{}: {}\n", self.what, self.kind),
            Show::Verdict if self.is_damaged() => format!("{}: {}, DAMAGED\n", self.what, self.kind),
            Show::Verdict => {
                format!(
                    "{}: {}, intact ({} verified)\n",
                    self.what,
                    self.kind,
                    show::bytes(self.verified_bytes)
                )
            }
        };
        if show == Show::Contents {
            let width = self.facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
            for (name, value) in &self.facts {
                text += &format!("  {name:<width$}  {}\n", show_value(name, value));
            }
            for List { name, columns, rows } in &self.lists {
                if rows.is_empty() {
                    continue;
                }
                text += &format!("  {name}:\n");
                let mut table = Table::new(columns);
                for row in rows {
                    table.row(columns.iter().zip(row).map(|(column, value)| show_value(column, value)));
                }
                text += &table.render("    ");
            }
        }
        for note in &self.notes {
            text += &format!("  note: {note}\n");
        }
        for Damage { offset, what } in &self.damages {
            match offset {
                Some(offset) => text += &format!("  damaged at byte {offset}: {what}\n"),
                None => text += &format!("  damaged: {what}\n"),
            }
        }
        text
    }
}

fn show_value(name: &str, value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Number(number) => match number.as_u64() {
            Some(bytes) if name.ends_with("bytes") && bytes >= 1024 => {
                format!("{} ({})", show::count(bytes), show::bytes(bytes))
            }
            Some(number) => show::count(number),
            None => number.to_string(),
        },
        Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let mut report = Report::new("a/file", "segment");
        report.fact("length bytes", 4096);
        report.list("blocks", &["offset", "log id"], vec![vec![0.into(), "7f".into()]]);
        report.note("odd");
        report.verified(4096);
        assert_eq!(
            report.to_text(Show::Contents),
            "a/file: segment\n  length bytes  4,096 (4.0 KiB)\n  blocks:\n    offset  log id\n         0      7f\n  note: odd\n"
        );
        assert_eq!(report.to_json(Show::Contents)["blocks"][0]["log_id"], "7f");
        assert_eq!(report.to_json(Show::Contents)["length_bytes"], 4096);
        assert_eq!(
            report.to_text(Show::Verdict),
            "a/file: segment, intact (4.0 KiB verified)\n  note: odd\n"
        );
        report.damage(Some(12), "torn");
        assert!(report.to_text(Show::Verdict).contains("DAMAGED\n  note: odd\n  damaged at byte 12: torn\n"));
        let json = report.to_json(Show::Verdict);
        assert_eq!((&json["intact"], &json["damages"][0]["offset"]), (&json!(false), &json!(12)));
    }
}
