//! Settings that no rule uses, but that a disk must keep when another program serves it: limits, serial number, block
//! sizes.

use std::collections::BTreeMap;

/// The maximum length of a virtio disk's serial number (virtio 1.3 §5.2.6, `VIRTIO_BLK_T_GET_ID`).
const SERIAL_MAX: usize = 20;

/// The names of each rate in the order of [`Dialect`].
const RATES: [[&str; 4]; 6] = [
    ["bps", "bps", "bps-total", "total_bytes_sec"],
    ["bps-rd", "bps_rd", "bps-read", "read_bytes_sec"],
    ["bps-wr", "bps_wr", "bps-write", "write_bytes_sec"],
    ["iops", "iops", "iops-total", "total_iops_sec"],
    ["iops-rd", "iops_rd", "iops-read", "read_iops_sec"],
    ["iops-wr", "iops_wr", "iops-write", "write_iops_sec"],
];

/// The suffixes for a rate, its burst, and the burst's length in seconds.
const PARTS: [[&str; 4]; 3] = [
    ["", "", "", ""],
    ["-max", "_max", "-max", "_max"],
    ["-max-length", "_max_length", "-max-length", "_max_length"],
];

/// The size in bytes above which a request counts as several.
const SIZE: [&str; 4] = ["iops-size", "iops_size", "iops-size", "size_iops_sec"];

/// The syntax in which a limit is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `ringdisk.toml`.
    Ringdisk,
    /// `-drive iops_rd=`: the syntax before QEMU 2.0, which QEMU still accepts.
    OldDrive,
    /// `-drive throttling.iops-read=`; `-object throttle-group,x-iops-read=`.
    Qemu,
    /// `<iotune>`.
    Libvirt,
}

/// A limit on a disk's I/O. The order is that in which limits are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Limit(usize);

impl Limit {
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=RATES.len() * PARTS.len()).map(Self)
    }

    pub fn name(self, dialect: Dialect) -> String {
        let place = dialect as usize;
        let (rate, part) = (self.0 / PARTS.len(), self.0 % PARTS.len());
        match RATES.get(rate) {
            Some(rate) => format!("{}{}", rate[place], PARTS[part][place]),
            None => SIZE[place].to_owned(),
        }
    }

    pub fn named(name: &str, dialect: Dialect) -> Option<Self> {
        let place = dialect as usize;
        let is = |limit: &Self| match RATES.get(limit.0 / PARTS.len()) {
            Some(rate) => {
                name.strip_prefix(rate[place]) == Some(PARTS[limit.0 % PARTS.len()][place])
            }
            None => name == SIZE[place],
        };
        Self::all().find(is)
    }

    /// Whether it is a rate of requests, not of bytes.
    pub fn is_of_requests(self) -> bool {
        const BYTES: usize = 3;
        (BYTES * PARTS.len()..RATES.len() * PARTS.len()).contains(&self.0)
    }

    /// Whether it is a rate; bursts and sizes have no effect without one.
    pub fn is_rate(self) -> bool {
        self.0 < RATES.len() * PARTS.len() && self.0.is_multiple_of(PARTS.len())
    }
}

/// Whether a setting limits a disk: a rate other than 0. A value that is not a number may be a shell variable.
pub fn is_limit(name: &str, dialect: Dialect, value: &str) -> bool {
    Limit::named(name, dialect).is_some_and(Limit::is_rate) && value.parse() != Ok(0_u64)
}

/// Settings of a disk that a conversion preserves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    pub serial: Option<String>,
    /// In bytes.
    pub logical_block: Option<u64>,
    /// In bytes.
    pub physical_block: Option<u64>,
    /// The error policy for writes in QEMU's terms.
    pub werror: Option<String>,
    /// The error policy for reads in QEMU's terms.
    pub rerror: Option<String>,
    /// Without limits of 0, which means unlimited.
    pub limits: BTreeMap<Limit, u64>,
    /// The throttle group that shares the limits.
    pub group: Option<String>,
    /// Whether the disk has its own limits in addition to the group's. QEMU does not support that.
    pub has_own_limits: bool,
}

impl Carried {
    /// Sets a limit; ignores unknown names and the value 0.
    pub fn limit(&mut self, name: &str, dialect: Dialect, value: Option<u64>) {
        if let (Some(limit), Some(value @ 1..)) = (Limit::named(name, dialect), value) {
            self.limits.insert(limit, value);
        }
    }

    /// The logical and the physical block size for QEMU, if its default of 512 bytes is wrong. QEMU refuses physical blocks
    /// that are smaller than logical ones.
    pub fn block_sizes(&self) -> [(&'static str, Option<u64>); 2] {
        let logical = self.logical_block.filter(|bytes| *bytes != 512);
        [
            ("logical_block_size", logical),
            ("physical_block_size", self.physical_block.max(logical)),
        ]
    }

    /// The serial number that the guest sees. Like QEMU, this truncates a longer one.
    ///
    /// # Errors
    /// ringdisk accepts only printable ASCII.
    pub fn serial(&self) -> Result<Option<&str>, String> {
        let Some(serial) = self.serial.as_deref().filter(|serial| !serial.is_empty()) else {
            return Ok(None);
        };
        if !serial.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
            return Err("its serial number is not printable ASCII".into());
        }
        Ok(serial.get(..serial.len().min(SERIAL_MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_has_a_name_in_every_dialect() {
        let mut seen = std::collections::BTreeSet::new();
        for dialect in [
            Dialect::Ringdisk,
            Dialect::OldDrive,
            Dialect::Qemu,
            Dialect::Libvirt,
        ] {
            for limit in Limit::all() {
                let name = limit.name(dialect);
                assert_eq!(Limit::named(&name, dialect), Some(limit), "{name}");
                seen.insert((dialect as usize, name));
            }
        }
        assert_eq!(seen.len(), 4 * 19);
        let limit = Limit::named("iops_wr_max_length", Dialect::OldDrive).unwrap();
        assert_eq!(limit.name(Dialect::Qemu), "iops-write-max-length");
        assert_eq!(limit.name(Dialect::Libvirt), "write_iops_sec_max_length");
    }

    #[test]
    fn a_serial_number_is_cut_as_qemu_cuts_it() {
        let of = |serial: &str| Carried {
            serial: Some(serial.into()),
            ..Carried::default()
        };
        assert_eq!(
            of("123456789012345678901").serial(),
            Ok(Some("12345678901234567890"))
        );
        assert_eq!(of("").serial(), Ok(None));
        assert!(of("é").serial().is_err());
    }
}
