//! Settings that affect the speed of each disk, each with its source and what it overrides.

use rbd::{Origin, Setting};
use serde_json::{Value, json};

use crate::node::Node;
use crate::server::Server;
use crate::server::device::ServedDisk;

/// All disks, with their settings.
pub fn all(server: &Server) -> Value {
    let mut disks = Vec::new();
    server.each_disk(|disk| {
        let device = disk.export.map(|export| export.device.clone());
        disks.push((disk.node.clone(), device));
    });
    // Without the server's lock: a cluster that does not answer must not delay other commands.
    let disks = disks.iter();
    disks
        .map(|(node, served)| disk(node, served.as_deref()))
        .collect()
}

fn disk(node: &Node, served: Option<&ServedDisk>) -> Value {
    let spec = &node.spec;
    // A value that equals the default is reported as the default.
    let cache_from = match spec.cache {
        block::CacheMode::None => Origin::Ringdisk,
        _ => Origin::CommandLine,
    };
    let mut settings = vec![setting(
        "cache",
        spec.cache.word(),
        cache_from.word(),
        match node.rbd() {
            Some(_) => "none, directsync and writethrough do not use librbd's cache",
            None => "none and directsync bypass the host's page cache",
        },
    )];
    if let Some(choice) = &node.choice {
        let from = match spec.aio {
            block::Aio::Auto => Origin::Ringdisk,
            _ => Origin::CommandLine,
        };
        settings.push(setting(
            "aio",
            choice.aio.word(),
            from.word(),
            &choice.reason,
        ));
    }
    if let Some(served) = served {
        let threads = &served.threads;
        let ids: Vec<&str> = threads.iter().map(|t| t.id.as_str()).collect();
        let from = if spec.iothreads.is_empty() {
            Origin::Ringdisk
        } else {
            Origin::CommandLine
        };
        let about = "the I/O threads that serve its queues, in turn";
        settings.push(setting("iothreads", &ids.join(","), from.word(), about));
    }
    if let Some(rbd) = node.rbd() {
        let lock = match rbd.lock() {
            Some(true) => "ours",
            Some(false) => "not ours",
            None => "none",
        };
        let about = "the image's exclusive lock, which the first write takes";
        settings.push(setting("lock", lock, "cluster", about));
        settings.extend(rbd.settings().iter().map(ceph_setting));
    }
    json!({ "name": node.name(), "file": node.filename, "settings": settings })
}

fn setting(name: &str, value: &str, from: &str, about: &str) -> Value {
    json!({ "name": name, "value": value, "from": from, "overridden": [], "about": about })
}

fn ceph_setting(setting: &Setting) -> Value {
    let overridden = setting.overridden.iter();
    let overridden: Vec<_> = overridden
        .map(|(from, value)| json!({ "from": from.word(), "value": value }))
        .collect();
    json!({
        "name": setting.name,
        "value": setting.value,
        "from": setting.origin.word(),
        "overridden": overridden,
        "about": setting.about,
    })
}

/// The reply of [`all`] as text.
pub fn text(disks: &Value) -> String {
    let mut text = String::new();
    let word = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    for disk in disks.as_array().into_iter().flatten() {
        text += &format!("disk {}: {}\n", word(&disk["name"]), word(&disk["file"]));
        let settings = disk["settings"].as_array().map_or(&[][..], Vec::as_slice);
        let width = |key: &str| {
            let values = settings.iter().map(|s| word(&s[key]).chars().count());
            values.max().unwrap_or(0)
        };
        let (names, values, froms) = (width("name"), width("value"), width("from"));
        for setting in settings {
            text += &format!(
                "  {:names$}  {:values$}  {:froms$}  {}\n",
                word(&setting["name"]),
                word(&setting["value"]),
                word(&setting["from"]),
                word(&setting["about"])
            );
            for before in setting["overridden"].as_array().into_iter().flatten() {
                let (value, from) = (word(&before["value"]), word(&before["from"]));
                text += &format!("  {:names$}  {value} from {from} is OVERRIDDEN\n", "");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overridden_values_are_shown() {
        let setting = Setting {
            name: "rbd_cache".into(),
            value: "false".into(),
            origin: Origin::CommandLine,
            overridden: vec![(Origin::Conf, "true".into())],
            about: "librbd's cache",
        };
        let disks =
            json!([{ "name": "vm1", "file": "rbd:p/vm1", "settings": [ceph_setting(&setting)] }]);
        assert_eq!(
            text(&disks),
            "disk vm1: rbd:p/vm1\n  rbd_cache  false  command line  librbd's cache\n             \
             true from ceph.conf is OVERRIDDEN\n"
        );
    }
}
