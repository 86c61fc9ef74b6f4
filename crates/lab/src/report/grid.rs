//! The loads of a plan as a table, for charts.

use crate::analysis::Analysis;
use crate::plan::Workload;
use crate::plan::units::size;
use crate::plan::workload::KEYS;

/// A plan's loads as rows and columns: one key makes the columns, and the others the rows.
pub struct Grid {
    /// The key of the columns; empty if there is only one column.
    pub key: &'static str,
    /// The values of the columns.
    pub columns: Vec<String>,
    /// The rows: a name, and the load in each column.
    pub rows: Vec<(String, Vec<Option<usize>>)>,
}

impl Grid {
    /// The grid of a plan's loads. The key with the most values makes the columns; among several, the depth.
    pub fn of(analysis: &Analysis) -> Grid {
        let loads = &analysis.plan().workloads;
        let values = |key: &str| {
            let mut values: Vec<String> = Vec::new();
            for load in loads
                .iter()
                .map(|load| load.get(key))
                .filter(|value| value != "-" && value != "none")
            {
                if !values.contains(&load) {
                    values.push(load);
                }
            }
            values
        };
        let wanted = ["iodepth", "rate", "numjobs", "bs"];
        let key = wanted
            .into_iter()
            .max_by_key(|key| (values(key).len(), *key == "iodepth"))
            .unwrap_or("iodepth");
        let mut columns = values(key);
        columns.sort_by_key(|column| size(column).unwrap_or(0));
        if columns.len() < 2 {
            let rows = loads
                .iter()
                .enumerate()
                .map(|(index, load)| (load.name.clone(), vec![Some(index)]))
                .collect();
            return Grid {
                key: "",
                columns: vec![String::new()],
                rows,
            };
        }
        let mut rows: Vec<(Vec<String>, String, Vec<Option<usize>>)> = Vec::new();
        let varied: Vec<&str> = KEYS
            .into_iter()
            .filter(|other| *other != key && values(other).len() > 1)
            .collect();
        for (index, load) in loads.iter().enumerate() {
            // A load to which the plan gives a name has its own row.
            let own_name = (load.clone().named().name
                != Workload {
                    name: String::new(),
                    ..load.clone()
                }
                .named()
                .name)
                .then(|| load.name.clone());
            let rest: Vec<String> = varied
                .iter()
                .map(|key| load.get(key))
                .chain(own_name.clone())
                .collect();
            let column = columns.iter().position(|value| *value == load.get(key));
            let name = own_name.unwrap_or_else(|| {
                let words: Vec<String> = varied
                    .iter()
                    .map(|key| load.get(key))
                    .filter(|value| value != "-")
                    .collect();
                if words.is_empty() {
                    format!("{} {}", load.get("rw"), load.get("bs"))
                } else {
                    words.join(" ")
                }
            });
            let row = match rows.iter().position(|(key, ..)| *key == rest) {
                Some(row) => row,
                None => {
                    rows.push((rest, name, vec![None; columns.len()]));
                    rows.len() - 1
                }
            };
            if let Some(column) = column {
                rows[row].2[column] = Some(index);
            }
        }
        Grid {
            key,
            columns,
            rows: rows
                .into_iter()
                .map(|(_, name, loads)| (name, loads))
                .collect(),
        }
    }

    /// The title of the columns' axis.
    pub fn title(&self) -> &'static str {
        match self.key {
            "iodepth" => "depth",
            "rate" => "offered requests per second",
            "numjobs" => "jobs",
            "bs" => "block size",
            _ => "",
        }
    }
}
