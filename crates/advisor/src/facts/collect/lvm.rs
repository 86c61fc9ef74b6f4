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
    /// Used space of its pool, and of the pool's metadata, in percent.
    used: [Option<u64>; 2],
}

/// All logical volumes of the host.
pub(super) fn volumes() -> Vec<Volume> {
    let fields = "lv_path,segtype,origin,chunk_size,zero,vg_extent_size,pool_lv,vg_name,lv_name,\
                  data_percent,metadata_percent";
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
    parse(&output("lvs", &arguments).unwrap_or_default())
}

fn parse(text: &str) -> Vec<Volume> {
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
        let &[path, segment, origin, _, _, extent, pool, group, name, ..] = line.as_slice() else {
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
            used: [9, 10].map(|field| {
                let percent: f64 = of_pool(field)?.parse().ok()?;
                (0.0..=100.0)
                    .contains(&percent)
                    .then_some(percent.round() as u64)
            }),
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
        for (key, used) in ["lvm-data-percent", "lvm-metadata-percent"]
            .into_iter()
            .zip(volume.used)
        {
            if let Some(percent) = used {
                map.insert(key.into(), json!(percent));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thin_volumes_have_the_properties_of_their_pool() {
        let text = "  /dev/pve/root|linear||||4194304||pve|root||\n\
                    \x20 |thin-pool||65536|zero|4194304||pve|data|93.61|12.40\n\
                    \x20 /dev/pve/vm-1|thin||0||4194304|data|pve|vm-1|40.00|\n\
                    \x20 /dev/pve/off|thin||0||4194304|gone|pve|off||\n\
                    \x20 broken|line\n";
        let volumes = parse(text);
        let found: Vec<_> = volumes
            .iter()
            .map(|volume| (volume.path.as_str(), volume.kind, volume.chunk, volume.used))
            .collect();
        assert_eq!(
            found,
            [
                ("/dev/pve/root", "thick", None, [None, None]),
                ("", "thick", None, [None, None]),
                ("/dev/pve/vm-1", "thin", Some(65536), [Some(94), Some(12)]),
                ("/dev/pve/off", "thin", None, [None, None]),
            ]
        );
    }
}
