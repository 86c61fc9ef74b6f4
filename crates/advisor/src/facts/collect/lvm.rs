//! LVM volumes.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::output;
use crate::facts::Map;

/// One line of `lvs`.
pub(super) struct Volume {
    path: String,
    kind: &'static str,
    chunk: Option<u64>,
    zero: Option<bool>,
    extent: Option<u64>,
}

/// All logical volumes of the host.
pub(super) fn volumes() -> Vec<Volume> {
    let fields = "lv_path,segtype,origin,chunk_size,zero,vg_extent_size,pool_lv,vg_name,lv_name";
    let arguments = [
        "--all",
        "--noheadings",
        "--nosuffix",
        "--units",
        "b",
        "--separator",
        "|",
        "-o",
        fields,
    ];
    let text = output("lvs", &arguments).unwrap_or_default();
    let lines: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.trim().split('|').collect())
        .collect();
    let origins: Vec<&str> = lines
        .iter()
        .filter(|line| line.get(1) == Some(&"linear"))
        .filter_map(|line| line.get(2).copied())
        .filter(|origin| !origin.is_empty())
        .collect();
    let mut volumes = Vec::new();
    for line in &lines {
        let &[path, segment, origin, _, _, extent, pool, group, name] = line.as_slice() else {
            continue;
        };
        let kind = match segment {
            "thin" => "thin",
            "linear" | "striped" | "raid1" | "raid10"
                if !origin.is_empty() || origins.contains(&name) =>
            {
                "snapshot"
            }
            _ => "thick",
        };
        // The chunk size and zeroing are properties of the pool.
        let pool = lines.iter().find(|line| {
            line.get(7) == Some(&group)
                && line.get(8).map(|n| n.trim_matches(['[', ']'])) == Some(pool)
        });
        let of_pool = |field: usize| {
            pool.and_then(|line| line.get(field).copied())
                .filter(|text| !text.is_empty())
        };
        volumes.push(Volume {
            path: path.to_owned(),
            kind,
            chunk: of_pool(3).and_then(|text| text.parse().ok()),
            zero: of_pool(4).map(|text| text.contains("zero") || text == "1"),
            extent: extent.parse().ok(),
        });
    }
    volumes
}

/// Adds the properties of the logical volume at a path, if it is one.
pub(super) fn add_volume(path: &Path, volumes: &[Volume], map: &mut Map) {
    let is_same = |volume: &&Volume| {
        !volume.path.is_empty()
            && fs::canonicalize(&volume.path).ok() == fs::canonicalize(path).ok()
    };
    let Some(volume) = volumes.iter().find(is_same) else {
        return;
    };
    map.insert("lvm".into(), json!(volume.kind));
    if let Some(extent) = volume.extent {
        map.insert("lvm-extent".into(), json!(extent));
    }
    if volume.kind == "thin" {
        if let Some(chunk) = volume.chunk {
            map.insert("lvm-chunk".into(), json!(chunk));
        }
        if let Some(zero) = volume.zero {
            map.insert("lvm-zero".into(), json!(zero));
        }
    }
}
