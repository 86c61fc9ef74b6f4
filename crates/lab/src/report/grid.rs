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
        let key = ["iodepth", "rate", "numjobs", "bs"]
            .into_iter()
            .max_by_key(|key| (values(loads, key).len(), *key == "iodepth"))
            .unwrap_or("iodepth");
        let mut columns = values(loads, key);
        if columns.len() < 2 {
            return Grid::one_column(loads);
        }
        columns.sort_by_key(|column| size(column).unwrap_or(0));
        let row_keys: Vec<&str> = KEYS
            .into_iter()
            .filter(|other| *other != key && values(loads, other).len() > 1)
            .collect();
        let mut rows: Vec<(Vec<String>, Vec<Option<usize>>)> = Vec::new();
        let mut names = Vec::new();
        for (index, load) in loads.iter().enumerate() {
            let own_name = own_name(load);
            let row_values = row_keys.iter().map(|key| load.get(key));
            let row_values: Vec<String> = row_values.chain(own_name.clone()).collect();
            let known = rows.iter().position(|(values, _)| *values == row_values);
            let row = known.unwrap_or_else(|| {
                names.push(own_name.unwrap_or_else(|| row_name(load, &row_keys)));
                rows.push((row_values, vec![None; columns.len()]));
                rows.len() - 1
            });
            let value = load.get(key);
            if let Some(column) = columns.iter().position(|column| *column == value) {
                rows[row].1[column] = Some(index);
            }
        }
        let loads = rows.into_iter().map(|(_, loads)| loads);
        Grid {
            key,
            columns,
            rows: names.into_iter().zip(loads).collect(),
        }
    }

    fn one_column(loads: &[Workload]) -> Grid {
        let row = |(index, load): (usize, &Workload)| (load.name.clone(), vec![Some(index)]);
        Grid {
            key: "",
            columns: vec![String::new()],
            rows: loads.iter().enumerate().map(row).collect(),
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

/// The different values of a key, in the order of the loads.
fn values(loads: &[Workload], key: &str) -> Vec<String> {
    let mut values: Vec<String> = Vec::new();
    for value in loads.iter().map(|load| load.get(key)) {
        if value != "-" && value != "none" && !values.contains(&value) {
            values.push(value);
        }
    }
    values
}

/// The name that the plan gives to a load; such a load has its own row.
fn own_name(load: &Workload) -> Option<String> {
    let unnamed = Workload {
        name: String::new(),
        ..load.clone()
    };
    (load.clone().named().name != unnamed.named().name).then(|| load.name.clone())
}

fn row_name(load: &Workload, row_keys: &[&str]) -> String {
    let values = row_keys.iter().map(|key| load.get(key));
    let values: Vec<String> = values.filter(|value| value != "-").collect();
    if values.is_empty() {
        return format!("{} {}", load.get("rw"), load.get("bs"));
    }
    values.join(" ")
}
