//! SARIF 2.1.0 (OASIS), for code review and CI.

use serde_json::{Value, json};

use super::Report;
use crate::rules::{Rules, Severity};

/// A log of one run.
pub fn sarif(report: &Report, rules: &Rules, version: &str) -> Value {
    let level = |severity| match severity {
        Severity::Error | Severity::High => "error",
        Severity::Medium | Severity::Low => "warning",
        Severity::Info => "note",
    };
    let mut used: Vec<&str> = report
        .findings
        .iter()
        .map(|finding| finding.rule.as_str())
        .collect();
    used.sort_unstable();
    used.dedup();
    let descriptors: Vec<Value> = used
        .iter()
        .filter_map(|id| rules.get(id))
        .map(|rule| {
            json!({
                "id": rule.id,
                "shortDescription": { "text": rule.title },
                "fullDescription": { "text": rule.advice },
                "help": { "text": super::explain(rule, rules) },
                "defaultConfiguration": { "level": level(rule.severity) },
            })
        })
        .collect();
    let results: Vec<Value> = report
        .findings
        .iter()
        .map(|finding| {
            let mut result = json!({
                "ruleId": finding.rule,
                "ruleIndex": used.iter().position(|id| *id == finding.rule),
                "level": level(finding.severity),
                "message": { "text": format!("{}: {}", finding.place(), finding.text) },
            });
            if let Some(at) = finding.at {
                result["locations"] = json!([{
                    "physicalLocation": {
                        "artifactLocation": { "uri": uri(&finding.file) },
                        "region": { "startLine": at.line, "startColumn": at.column },
                    }
                }]);
            }
            result
        })
        .collect();
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": { "name": "ringdisk check", "version": version, "rules": descriptors } },
            "columnKind": "unicodeCodePoints",
            "results": results,
        }],
    })
}

/// A path as a reference (RFC 3986): what is not allowed there is written in percent.
fn uri(path: &str) -> String {
    let mut uri = String::new();
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' | b'~' => {
                uri.push(char::from(byte))
            }
            byte => uri.push_str(&format!("%{byte:02X}")),
        }
    }
    uri
}
