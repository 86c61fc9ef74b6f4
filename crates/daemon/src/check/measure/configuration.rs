//! A VM's disk as a configuration of the lab.

use std::collections::BTreeSet;
use std::thread::available_parallelism;

use ::lab::plan::Settings;
use ::lab::plan::settings::KEYS;
use ::lab::plan::units::size_text;
use advisor::model::{Disk, Vm};

/// The limits of a guest's memory in bytes. The loads bypass the guest's page cache, so more memory changes nothing.
const MEMORY_MIN: u64 = 512 << 20;
const MEMORY_MAX: u64 = 2 << 30;

/// The lab's configuration of a disk.
#[derive(Clone, Debug)]
pub struct Configuration {
    pub settings: Settings,
    /// The keys whose values are the disk's own.
    known: BTreeSet<&'static str>,
    /// How the lab's guest differs from the VM.
    pub notes: Vec<String>,
}

impl Configuration {
    /// Translates the effective settings of a disk and its VM.
    ///
    /// # Errors
    /// The lab has no such disk.
    pub fn of(vm: &Vm, disk: &Disk) -> Result<Self, String> {
        let mut configuration = Self {
            settings: Settings::default(),
            known: BTreeSet::new(),
            notes: Vec::new(),
        };
        configuration.device(disk)?;
        configuration.image(disk)?;
        configuration.machine(vm);
        configuration.disk(vm, disk);
        configuration.ceph(disk);
        Ok(configuration)
    }

    pub fn value(&self, key: &str) -> String {
        self.settings.value(key)
    }

    pub fn is_known(&self, key: &str) -> bool {
        self.known.contains(key)
    }

    /// Sets a key, from now on as one of the disk's own.
    ///
    /// # Errors
    /// The lab has no such key or value.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let known = KEYS.into_iter().find(|known| *known == key);
        self.settings.set(key, value)?;
        self.known.extend(known);
        Ok(())
    }

    /// Sets a key to what the disk has, and notes what the lab cannot do.
    fn take(&mut self, key: &str, value: &str) {
        if let Err(problem) = self.set(key, value) {
            let value_there = self.value(key);
            self.notes
                .push(format!("{key}={value_there} instead of {value}: {problem}"));
        }
    }

    fn device(&mut self, disk: &Disk) -> Result<(), String> {
        match disk.table.word("disk.bus") {
            Some(bus @ ("virtio-blk" | "virtio-scsi" | "ide" | "vhost-user-blk")) => {
                self.set("device", bus)
            }
            // A finding about the bus says what stands for it.
            Some(bus @ ("sata" | "scsi-emulated" | "usb" | "sd" | "nvme")) => {
                self.set_unknown("device", "ide")?;
                self.notes.push(format!("device=ide stands for {bus}"));
                Ok(())
            }
            Some(bus) => Err(format!("the lab has no disks of the kind '{bus}'")),
            None => Err("its bus is unknown".into()),
        }?;
        if self.value("device") == "ide" {
            self.set("machine", "pc")?;
        }
        Ok(())
    }

    fn set_unknown(&mut self, key: &str, value: &str) -> Result<(), String> {
        self.settings.set(key, value)
    }

    fn image(&mut self, disk: &Disk) -> Result<(), String> {
        match disk.table.word("disk.format") {
            Some(format @ ("raw" | "qcow2")) => self.set("format", format)?,
            Some(format) => return Err(format!("the lab has raw and qcow2 images, not {format}")),
            None => {
                let named = disk.file.ends_with(".qcow2");
                self.set_unknown("format", if named { "qcow2" } else { "raw" })?;
            }
        }
        if self.value("format") != "qcow2" {
            return Ok(());
        }
        if let Some(bytes) = disk.table.number("backing.qcow2-cluster-size")
            && bytes != 64 << 10
        {
            self.take("cluster-size", &size_text(bytes));
        }
        if disk.table.is_yes("backing.qcow2-subclusters") {
            self.take("extended-l2", "on");
        }
        if disk.table.is_yes("backing.qcow2-backed") {
            self.take("backing-files", "1");
        }
        Ok(())
    }

    fn machine(&mut self, vm: &Vm) {
        let table = &vm.table;
        match table.word("vm.machine") {
            _ if self.is_known("machine") => {}
            Some(name) if name.contains("q35") => self.take("machine", "q35"),
            Some(name) if name.starts_with("pc") => self.take("machine", "pc"),
            Some(name) => self.notes.push(format!("machine=q35 stands for {name}")),
            None => {}
        }
        let cpus = available_parallelism().map_or(1, usize::from) as u64;
        if let Some(vcpus) = table.number("vm.vcpus") {
            let bounded = vcpus.clamp(1, cpus);
            self.take("vcpus", &bounded.to_string());
            if bounded < vcpus {
                self.notes.push(format!(
                    "vcpus={bounded} instead of {vcpus}: this host has {cpus} CPUs"
                ));
            }
        }
        if let Some(bytes) = table.number("vm.memory") {
            let bounded = bytes.clamp(MEMORY_MIN, MEMORY_MAX) >> 20;
            self.take("memory", &format!("{bounded}M"));
        }
        if table.is_yes("vm.hugepages") {
            self.take("hugepages", "on");
        }
        let off = |name: &str| table.word(name) == Some("off");
        let flags = [
            (off("vm.cpu-x2apic"), "x2apic=off"),
            (off("vm.cpu-pv-eoi"), "kvm-pv-eoi=off"),
        ];
        let flags: Vec<&str> = flags
            .into_iter()
            .filter_map(|(is_off, flag)| is_off.then_some(flag))
            .collect();
        if !flags.is_empty() {
            self.take("cpu", &format!("host,{}", flags.join(",")));
        }
        if let Some(os @ ("windows" | "other")) = table.word("vm.os") {
            let os = if os == "other" {
                "another system"
            } else {
                "Windows"
            };
            self.notes
                .push(format!("the lab's guest runs Linux; this VM runs {os}"));
        }
        if let Some(accel @ ("tcg" | "xen" | "hvf" | "other")) = table.word("vm.accel") {
            self.notes.push(format!(
                "the lab's guest runs under KVM; this VM under {accel}"
            ));
        }
    }

    fn disk(&mut self, vm: &Vm, disk: &Disk) {
        let table = &disk.table;
        match table.word("disk.cache") {
            Some(cache) => self.take("cache", cache),
            None if self.value("device") == "vhost-user-blk" => {}
            None => self
                .notes
                .push("cache=none, because the VM's cache mode is unknown".into()),
        }
        if let Some(aio) = table.word("disk.aio") {
            self.take("aio", aio);
        }
        match table.number("disk.threads") {
            Some(0) => self.take("iothread", "off"),
            Some(1) => self.take("iothread", "on"),
            Some(threads) => self.take("iothread", &threads.to_string()),
            None => {}
        }
        // The lab's default is one queue per vCPU too, of which the VM may have more than this host has CPUs.
        match table.number("disk.queues") {
            Some(queues) if Some(queues) == vm.table.number("vm.vcpus") => {}
            Some(queues) => self.take("queues", &queues.to_string()),
            None => {}
        }
        if let Some(size) = table.number("disk.queue-size")
            && !matches!(self.value("device").as_str(), "vhost-user-blk")
            && size != 256
        {
            self.take("queue-size", &size.to_string());
        }
        if let Some(syntax) = table.word("disk.syntax") {
            self.take("syntax", syntax);
        }
        if table.is_yes("disk.fixed-buffers") {
            self.take("fixed-buffers", "on");
        }
    }

    fn ceph(&mut self, disk: &Disk) {
        let access = &disk.ceph;
        for (key, value) in [
            ("ceph-conf", &access.conf),
            ("ceph-user", &access.user),
            ("ceph-keyring", &access.keyring),
        ] {
            if let Some(value) = value {
                self.take(key, value);
            }
        }
    }
}
