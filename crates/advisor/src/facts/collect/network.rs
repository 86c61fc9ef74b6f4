//! The network link through which the host reaches an address.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use serde_json::json;

use super::Host;
use crate::facts::Map;

/// The maximum number of interfaces between a route and its link, such as bridges, bonds and VLANs.
const LAYERS_MAX: usize = 8;

/// Names that libvirt, QEMU, Proxmox and container engines give to a guest's end of a bridge.
const GUEST_PORTS: [&str; 6] = ["tap", "vnet", "veth", "fwpr", "fwln", "macvtap"];

impl Host {
    /// Adds the link to the storage at an address, written as in a mount option, a portal or `mon_host`.
    pub(super) fn add_link(&self, address: &str, map: &mut Map) {
        let Some(interface) = parse_address(address).and_then(|ip| self.route(ip)) else {
            return;
        };
        self.add_interface(&interface, map);
    }

    /// Adds the link below an interface.
    pub(super) fn add_interface(&self, interface: &str, map: &mut Map) {
        if interface == "lo" || interface.contains('/') {
            return;
        }
        let stack = self.layers(interface);
        let Some(link) = stack.last() else {
            return;
        };
        map.insert("nic".into(), json!(link));
        // The file has -1 while the speed is unknown.
        if let Some(mbps) = self.number(&format!("/sys/class/net/{link}/speed")) {
            map.insert("nic-mbps".into(), json!(mbps));
        }
        let shared = stack.iter().any(|name| self.has_guests(name));
        map.insert("nic-shared".into(), json!(shared));
        if let Some((slot, ports)) = self.slot(link) {
            map.insert("nic-pcie-mbps".into(), json!(slot));
            map.insert("nic-ports-mbps".into(), json!(ports));
        }
    }

    /// The interface of the most specific route to an address.
    fn route(&self, ip: IpAddr) -> Option<String> {
        let (text, parse): (_, fn(&str) -> Option<Route<'_>>) = match ip {
            IpAddr::V4(_) => (self.text("/proc/net/route")?, route_v4),
            IpAddr::V6(_) => (self.text("/proc/net/ipv6_route")?, route_v6),
        };
        let bits = match ip {
            IpAddr::V4(ip) => u128::from(u32::from(ip)) << 96,
            IpAddr::V6(ip) => u128::from(ip),
        };
        let routes = text.lines().filter_map(parse);
        let fitting = routes.filter(|route| route.contains(bits));
        let best = fitting.max_by_key(|route| (route.length, std::cmp::Reverse(route.metric)))?;
        Some(best.interface.to_owned())
    }

    /// An interface and those below it, the last of which is the link: a bond or a card's port.
    fn layers(&self, interface: &str) -> Vec<String> {
        let mut stack = vec![interface.to_owned()];
        while stack.len() < LAYERS_MAX {
            let Some(top) = stack.last() else { break };
            let directory = format!("/sys/class/net/{top}");
            if self.path(&format!("{directory}/bonding")).exists() {
                break;
            }
            let mut below = self.names(&format!("{directory}/brif"));
            below.extend(
                self.names(&directory)
                    .iter()
                    .filter_map(|name| name.strip_prefix("lower_").map(str::to_owned)),
            );
            let is_link = |name: &String| {
                let of = |part: &str| self.path(&format!("/sys/class/net/{name}/{part}")).exists();
                !is_guest_port(name) && (of("device") || of("bonding") || of("brport"))
            };
            match below.into_iter().find(is_link) {
                Some(next) if !stack.contains(&next) => stack.push(next),
                _ => break,
            }
        }
        stack
    }

    /// Whether guests are ports of the bridge that this interface is, or belongs to.
    fn has_guests(&self, interface: &str) -> bool {
        let directory = format!("/sys/class/net/{interface}");
        [
            format!("{directory}/brif"),
            format!("{directory}/brport/bridge/brif"),
        ]
        .iter()
        .any(|ports| self.names(ports).iter().any(|name| is_guest_port(name)))
    }

    /// The bandwidth of a card's PCIe slot, and the speed of all its ports that are up.
    fn slot(&self, link: &str) -> Option<(u64, u64)> {
        let device =
            |name: &str| fs::canonicalize(self.path(&format!("/sys/class/net/{name}/device"))).ok();
        // A bond has no slot of its own, and its members may be in several.
        let own = device(link)?;
        let mbps = pcie_mbps(&own)?;
        // 0000:41:00.1 is function 1 of the card 0000:41:00.
        let card = |path: &Path| {
            let name = path.file_name()?.to_str()?;
            Some(name.rsplit_once('.')?.0.to_owned())
        };
        let this = card(&own)?;
        let ports = self.names("/sys/class/net").into_iter();
        let ports =
            ports.filter(|name| device(name).and_then(|path| card(&path)).as_ref() == Some(&this));
        let speed = |name: String| self.number(&format!("/sys/class/net/{name}/speed"));
        Some((mbps, ports.filter_map(speed).fold(0, u64::saturating_add)))
    }

    /// The names in a directory, sorted.
    pub(super) fn names(&self, directory: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(self.path(directory))
            .into_iter()
            .flatten()
            .flatten();
        entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    }
}

fn is_guest_port(name: &str) -> bool {
    GUEST_PORTS.iter().any(|prefix| name.starts_with(prefix))
}

/// A route of the main table.
struct Route<'a> {
    interface: &'a str,
    /// The network, in the upper bits.
    network: u128,
    /// Bits of the network's mask
    length: u32,
    metric: u32,
}

impl Route<'_> {
    fn contains(&self, bits: u128) -> bool {
        let mask = u128::MAX.checked_shl(128 - self.length).unwrap_or(0);
        bits & mask == self.network & mask
    }
}

/// A line of /proc/net/route; numbers are hexadecimal, addresses in the byte order of the host.
fn route_v4(line: &str) -> Option<Route<'_>> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let &[interface, network, _, flags, _, _, metric, mask, ..] = fields.as_slice() else {
        return None;
    };
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    if hex(flags)? & 1 == 0 {
        return None;
    }
    Some(Route {
        interface,
        network: u128::from(u32::from_be(hex(network)?)) << 96,
        length: hex(mask)?.count_ones(),
        metric: metric.parse().ok()?,
    })
}

/// A line of /proc/net/ipv6_route.
fn route_v6(line: &str) -> Option<Route<'_>> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let &[network, length, _, _, _, metric, _, _, flags, interface] = fields.as_slice() else {
        return None;
    };
    let hex = |text: &str| u32::from_str_radix(text, 16).ok();
    if hex(flags)? & 1 == 0 {
        return None;
    }
    Some(Route {
        interface,
        network: u128::from_str_radix(network, 16).ok()?,
        length: hex(length).filter(|length| *length <= 128)?,
        metric: hex(metric)?,
    })
}

/// The first address in a text such as `10.0.0.1`, `10.0.0.1:3260`, `[fd00::1]:6789` or
/// `[v2:10.0.0.1:3300/0,v1:10.0.0.1:6789/0]`.
fn parse_address(text: &str) -> Option<IpAddr> {
    let mut text = text.trim().trim_start_matches('[');
    text = text
        .strip_prefix("v2:")
        .or(text.strip_prefix("v1:"))
        .unwrap_or(text);
    let text = text.trim_start_matches('[');
    let end = text
        .find(|c: char| !(c.is_ascii_hexdigit() || c == ':' || c == '.'))
        .unwrap_or(text.len());
    let text = &text[..end];
    let without_port = || text.rsplit_once(':').map(|(address, _)| address);
    text.parse().ok().or_else(|| without_port()?.parse().ok())
}

/// The bandwidth of a device's PCIe link in Mb/s: lanes times rate, without the line code.
fn pcie_mbps(device: &Path) -> Option<u64> {
    let read = |name: &str| -> Option<f64> {
        let text = fs::read_to_string(device.join(name)).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let (rate, lanes) = (read("current_link_speed")?, read("current_link_width")?);
    // PCIe 1 and 2 send 10 bits for 8, later ones 130 for 128.
    let code = if rate > 5.0 { 128.0 / 130.0 } else { 0.8 };
    let mbps = rate * lanes * code * 1000.0;
    (mbps.is_finite() && (1.0..1e9).contains(&mbps)).then_some(mbps.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_portals_mounts_and_monitors() {
        for (text, expected) in [
            ("10.0.0.1", Some("10.0.0.1")),
            ("10.0.0.1:3260,1", Some("10.0.0.1")),
            ("[v2:10.0.0.1:3300/0,v1:10.0.0.1:6789/0]", Some("10.0.0.1")),
            ("10.0.0.1,10.0.0.2", Some("10.0.0.1")),
            ("[fd00::1]:3260", Some("fd00::1")),
            ("fd00::1", Some("fd00::1")),
            ("[v2:[fd00::1]:3300/0]", Some("fd00::1")),
            ("storage.example.com", None),
            ("", None),
            ("[", None),
            (":::::", None),
        ] {
            let address = parse_address(text).map(|ip| ip.to_string());
            assert_eq!(address.as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn routes_are_read_or_skipped() {
        let line = "eth0\t00000A0A\t00000000\t0001\t0\t0\t100\t0000FFFF\t0\t0\t0";
        let route = route_v4(line).unwrap();
        assert_eq!(
            (route.interface, route.length, route.metric),
            ("eth0", 16, 100)
        );
        let bits =
            |text: &str| u128::from(u32::from(text.parse::<std::net::Ipv4Addr>().unwrap())) << 96;
        assert!(route.contains(bits("10.10.3.4")) && !route.contains(bits("10.11.3.4")));
        let line = "fd000000000000000000000000000000 08 00000000000000000000000000000000 00 \
                    00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth1";
        let route = route_v6(line).unwrap();
        assert_eq!(
            (route.interface, route.length, route.metric),
            ("eth1", 8, 256)
        );
        for text in [
            "",
            "Iface\tDestination",
            "eth0 x 0 0001 0 0 0 0",
            &line.replace(" 08 ", " ff "),
        ] {
            assert!(
                route_v4(text).is_none() && route_v6(text).is_none(),
                "{text}"
            );
        }
    }
}
