//! The processor of guests.

use std::fmt;
use std::str::FromStr;

/// The longest text, and the maximum number of features.
const TEXT_MAX: usize = 512;
const FEATURES_MAX: usize = 32;

/// A value of QEMU's `-cpu`: a model, and features with their values, such as `host,x2apic=off`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CpuModel(String);

impl CpuModel {
    /// The name of the model.
    pub fn model(&self) -> &str {
        self.0.split(',').next().unwrap_or_default()
    }

    /// The features with their values. `+NAME` and `-NAME` mean `on` and `off`.
    pub fn features(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.split(',').skip(1).filter_map(feature)
    }

    /// The part that only KVM has, if there is one.
    pub fn kvm_only(&self) -> Option<&str> {
        let mut features = self.features().map(|(name, _)| name);
        match self.model() {
            "host" => Some("host"),
            _ => features.find(|name| name.starts_with("kvm") || name.starts_with("hv")),
        }
    }
}

fn feature(part: &str) -> Option<(&str, &str)> {
    let (name, value) = if let Some(name) = part.strip_prefix('+') {
        (name, "on")
    } else if let Some(name) = part.strip_prefix('-') {
        (name, "off")
    } else {
        part.split_once('=')?
    };
    (is_word(name) && is_word(value)).then_some((name, value))
}

/// Whether QEMU cannot read an option in this text.
fn is_word(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain)
}

impl FromStr for CpuModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.len() > TEXT_MAX {
            return Err(format!("a cpu has at most {TEXT_MAX} characters"));
        }
        let mut parts = text.split(',');
        let model = parts.next().unwrap_or_default();
        // Words of QEMU's that print a list, and end.
        if !is_word(model) || model == "help" {
            return Err(format!("'{model}' is not a model, such as host or max"));
        }
        let mut names = Vec::new();
        for part in parts {
            let Some((name, _)) = feature(part) else {
                return Err(format!(
                    "'{part}' is not a feature, as in x2apic=off, +x2apic or -x2apic"
                ));
            };
            let name = name.replace('_', "-");
            if names.contains(&name) {
                return Err(format!("'{name}' is there twice"));
            }
            names.push(name);
        }
        if names.len() > FEATURES_MAX {
            return Err(format!("a cpu has at most {FEATURES_MAX} features"));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_and_features_are_read() {
        let cpu: CpuModel = "Skylake-Client-v4,x2apic=off,+kvm-pv-eoi,-avx,hv-spinlocks=0x1fff"
            .parse()
            .unwrap();
        assert_eq!(cpu.model(), "Skylake-Client-v4");
        let features: Vec<_> = cpu.features().collect();
        assert_eq!(
            features,
            [
                ("x2apic", "off"),
                ("kvm-pv-eoi", "on"),
                ("avx", "off"),
                ("hv-spinlocks", "0x1fff")
            ]
        );
        assert_eq!(cpu.kvm_only(), Some("kvm-pv-eoi"));
        assert_eq!(
            "max,x2apic=off".parse::<CpuModel>().unwrap().kvm_only(),
            None
        );
        assert_eq!("host".parse::<CpuModel>().unwrap().kvm_only(), Some("host"));
    }

    #[test]
    fn other_options_of_qemu_are_refused() {
        for wrong in [
            "",
            "help",
            "host,",
            "host,x2apic",
            "host,x2apic=",
            "host,a=b c",
            "host,=on",
            "-host",
            "host,a=on,a=off",
            "host,kvm_pv_eoi=on,kvm-pv-eoi=off",
            "host,+-a",
            "host\n-object",
            "host,x=a/b",
        ] {
            assert!(wrong.parse::<CpuModel>().is_err(), "{wrong}");
        }
        let many = format!("host{}", ",a=on".repeat(200));
        assert!(many.parse::<CpuModel>().is_err());
    }
}
