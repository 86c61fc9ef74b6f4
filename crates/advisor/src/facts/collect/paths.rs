//! Storage that the host reaches over a network, or through several paths: NVMe over fabrics, iSCSI, device-mapper.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{Host, output};
use crate::facts::{Facts, Map};

/// The maximum number of arguments of a multipath map.
const ARGUMENTS_MAX: usize = 65_536;

impl Host {
    /// Adds how the host reaches a block device.
    pub(super) fn add_paths(&self, name: &str, map: &mut Map) {
        let block = format!("/sys/block/{name}");
        let is_multipath = self.dm_name(name).is_some();
        let slaves = || self.names(&format!("{block}/slaves")).len();
        let paths = if is_multipath { slaves() } else { 1 };
        map.insert("paths".into(), json!(paths));
        let Ok(at) = fs::canonicalize(self.path(&block)) else {
            return;
        };
        let is_stacked = ["dm-", "md", "bcache"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
        if name.starts_with("nvme") {
            self.add_nvme(&block, &at, map);
        } else if is_stacked {
            map.insert("transport".into(), json!("stacked"));
        } else if self.path(&format!("{block}/device")).exists() && !name.starts_with("rbd") {
            self.add_scsi(&block, &at, map);
        } else {
            map.insert("transport".into(), json!("other"));
        }
    }

    /// The name of a multipath map of device-mapper.
    fn dm_name(&self, name: &str) -> Option<String> {
        let dm = format!("/sys/block/{name}/dm");
        let is_multipath = self.text(&format!("{dm}/uuid"))?.starts_with("mpath-");
        is_multipath.then(|| self.text(&format!("{dm}/name")))?
    }

    /// A namespace. With the kernel's multipath, it is below a subsystem that lists its controllers; otherwise it is below
    /// its only controller.
    fn add_nvme(&self, block: &str, at: &Path, map: &mut Map) {
        let parent = at.parent().unwrap_or(at);
        let read = |directory: &Path, name: &str| read(&directory.join(name));
        let is_controller = |name: &str| {
            let number = name.strip_prefix("nvme").unwrap_or_default();
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        let mut controllers: Vec<PathBuf> = Vec::new();
        if read(parent, "iopolicy").is_some() {
            let entries = fs::read_dir(parent).into_iter().flatten().flatten();
            let named = entries.filter(|entry| is_controller(&entry.file_name().to_string_lossy()));
            controllers.extend(named.map(|entry| entry.path()));
            controllers.sort();
            map.insert("paths".into(), json!(controllers.len()));
            map.insert("path-policy".into(), json!(read(parent, "iopolicy")));
        } else {
            controllers.push(parent.to_owned());
        }
        let Some(first) = controllers.first() else {
            return;
        };
        let Some(transport) = read(first, "transport") else {
            return;
        };
        let is_fabric = matches!(transport.as_str(), "tcp" | "rdma" | "fc");
        let word = match transport.as_str() {
            "pcie" | "tcp" | "rdma" | "fc" => transport.as_str(),
            _ => "other",
        };
        map.insert("transport".into(), json!(word));
        if !is_fabric {
            return;
        }
        let fewest = |name: &str| {
            let numbers = controllers
                .iter()
                .filter_map(|path| read(path, name)?.parse::<u64>().ok());
            numbers.min()
        };
        // One of the queues is for administration; the size counts from zero.
        if let Some(queues) = fewest("queue_count") {
            map.insert("io-queues".into(), json!(queues.saturating_sub(1)));
        }
        if let Some(size) = fewest("sqsize") {
            map.insert("queue-size".into(), json!(size.saturating_add(1)));
        }
        if word != "tcp" {
            return;
        }
        // The kernel shows no option of a connection, but requires stable pages if data has digests.
        if let Some(stable) = self.number(&format!("{block}/queue/stable_writes")) {
            map.insert("data-digest".into(), json!(stable == 1));
        }
        // traddr=10.0.0.1,trsvcid=4420,host_iface=eth1
        let address = read(first, "address").unwrap_or_default();
        let field = |key: &str| address.split(',').find_map(|part| part.strip_prefix(key));
        match (field("host_iface="), field("traddr=")) {
            (Some(interface), _) => self.add_interface(interface, map),
            (None, Some(target)) => self.add_link(target, map),
            _ => {}
        }
    }

    /// A SCSI disk, which is below its iSCSI session or its Fibre Channel port.
    fn add_scsi(&self, block: &str, at: &Path, map: &mut Map) {
        if let Some(depth) = self.number(&format!("{block}/device/queue_depth")) {
            map.insert("scsi-queue-depth".into(), json!(depth));
        }
        let parts = at.iter().filter_map(|part| part.to_str());
        let session = parts.clone().find_map(|part| part.strip_prefix("session"));
        let session = session.and_then(|number| number.parse::<u32>().ok());
        let Some(session) = session else {
            let is_fc = parts.clone().any(|part| part.starts_with("rport-"));
            let word = if is_fc { "fc" } else { "local" };
            map.insert("transport".into(), json!(word));
            return;
        };
        map.insert("transport".into(), json!("iscsi"));
        let holders = self.names(&format!("{block}/holders"));
        let is_path = holders.iter().any(|holder| self.dm_name(holder).is_some());
        map.insert("multipath".into(), json!(is_path));
        let connection = format!("/sys/class/iscsi_connection/connection{session}:0");
        for digest in ["header", "data"] {
            if let Some(flag) = self.number(&format!("{connection}/{digest}_digest")) {
                map.insert(format!("{digest}-digest"), json!(flag != 0));
            }
        }
        let address = self
            .text(&format!("{connection}/address"))
            .or_else(|| self.text(&format!("{connection}/persistent_address")));
        if let Some(address) = address {
            self.add_link(&address, map);
        }
    }

    /// Adds the path groups of multipath maps, which only `dmsetup` shows.
    pub(super) fn add_path_groups(&self, facts: &mut Facts) {
        let maps: Vec<(String, String)> = facts
            .devices
            .keys()
            .filter_map(|device| Some((device.clone(), self.dm_name(device)?)))
            .collect();
        if maps.is_empty() {
            return;
        }
        let tables = output("dmsetup", &["table", "--target", "multipath"]).unwrap_or_default();
        for (device, name) in maps {
            let table = tables
                .lines()
                .find_map(|line| line.strip_prefix(name.as_str())?.strip_prefix(": "));
            if let (Some(table), Some(map)) = (table, facts.devices.get_mut(&device)) {
                add_groups(table, map);
            }
        }
    }
}

/// Adds the largest group of paths of a map, and how requests are spread over them. A map is a list of words (dm-mpath.c):
/// `START LENGTH multipath`, then features, arguments of the hardware handler (both with their number first), the number of
/// groups and that of the next one, and for each group its selector with arguments, the numbers of paths and of arguments
/// for each, and the paths.
fn add_groups(table: &str, map: &mut Map) {
    if let Some((selector, largest)) = groups(table) {
        map.insert("path-policy".into(), json!(selector));
        map.insert("paths-together".into(), json!(largest));
    }
}

fn groups(table: &str) -> Option<(String, u64)> {
    let mut words = table.split_whitespace().take(ARGUMENTS_MAX);
    if words.nth(2)? != "multipath" {
        return None;
    }
    fn number<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<usize> {
        words
            .next()?
            .parse()
            .ok()
            .filter(|count| *count < ARGUMENTS_MAX)
    }
    fn skip<'a>(words: &mut impl Iterator<Item = &'a str>, count: usize) -> Option<()> {
        (0..count).try_for_each(|_| words.next().map(drop))
    }
    for _ in ["features", "hardware handler"] {
        let count = number(&mut words)?;
        skip(&mut words, count)?;
    }
    let count = number(&mut words)?;
    words.next()?;
    let mut best: Option<(String, u64)> = None;
    for _ in 0..count {
        let selector = words.next()?;
        let arguments = number(&mut words)?;
        skip(&mut words, arguments)?;
        let (paths, each) = (number(&mut words)?, number(&mut words)?);
        skip(&mut words, paths.checked_mul(each + 1)?)?;
        if best.as_ref().is_none_or(|(_, most)| paths as u64 > *most) {
            best = Some((selector.to_owned(), paths as u64));
        }
    }
    best
}

fn read(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut text = String::new();
    fs::File::open(path)
        .ok()?
        .take(1 << 16)
        .read_to_string(&mut text)
        .ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multipath_tables_are_read_or_refused() {
        for (table, expected) in [
            (
                "0 209715200 multipath 2 queue_if_no_path retain_attached_hw_handler 1 alua 2 1 service-time 0 2 2 8:16 1 1 8:32 \
                 1 1 service-time 0 1 2 8:48 1 1",
                Some(("service-time", 2)),
            ),
            (
                "0 8388608 multipath 1 queue_if_no_path 0 1 1 round-robin 0 4 1 8:48 1000 8:96 1000 8:144 1000 8:192 1000",
                Some(("round-robin", 4)),
            ),
            (
                "0 1 multipath 0 0 2 1 service-time 0 1 0 8:16 service-time 0 1 0 8:32",
                Some(("service-time", 1)),
            ),
            ("0 1 multipath 0 0 0 0", None),
            ("0 1 linear 8:16 0", None),
            ("0 1 multipath 99999999999 0", None),
            (
                "0 1 multipath 0 0 1 1 service-time 0 65535 65535 8:16",
                None,
            ),
            ("0 1 multipath 0 0 9 1 service-time 0 1 0 8:16", None),
            ("", None),
        ] {
            let found = groups(table);
            let found = found
                .as_ref()
                .map(|(selector, paths)| (selector.as_str(), *paths));
            assert_eq!(found, expected, "{table}");
        }
    }
}
