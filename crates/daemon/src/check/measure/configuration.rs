//! A VM's disk as a configuration of the lab.

use std::collections::BTreeSet;

use ::lab::guest::Accel;
use ::lab::plan::Settings;
use ::lab::plan::settings::KEYS;
use ::lab::plan::units::size_text;
use advisor::model::carried::Dialect;
use advisor::model::cpus::{self, CpuList};
use advisor::model::{Disk, Thread, ThreadUse, Vm};
use advisor::text::printable;

use super::loads::library;

/// The limits of a guest's memory in bytes. The loads bypass the guest's page cache, so more memory changes nothing.
const MEMORY_MIN: u64 = 512 << 20;
const MEMORY_MAX: u64 = 2 << 30;
/// The lab's maximum.
const VCPUS_MAX: u64 = 256;
/// The time for which QEMU's IOThreads poll by default (`IOTHREAD_POLL_MAX_NS_DEFAULT`).
const POLL_DEFAULT_NS: u64 = 32_768;

/// The host on which the lab's guests run.
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// The number of its CPUs, if it is known.
    pub cpus: Option<u64>,
    pub accel: Accel,
}

/// The lab's configuration of a disk.
#[derive(Clone, Debug)]
pub struct Configuration {
    pub settings: Settings,
    /// The keys whose values are the disk's own.
    known: BTreeSet<&'static str>,
    /// How the lab's disk differs from the VM's.
    pub notes: Vec<String>,
    /// How the lab's guest differs from the VM.
    pub guest_notes: Vec<String>,
    /// That the lab's guest has fewer vCPUs than the VM, and why.
    fewer_vcpus: Option<String>,
}

impl Configuration {
    /// Translates the effective settings of a disk and its VM.
    ///
    /// # Errors
    /// The lab has no such disk.
    pub fn of(vm: &Vm, disk: &Disk, host: &Host) -> Result<Self, String> {
        let mut configuration = Self {
            settings: Settings::default(),
            known: BTreeSet::new(),
            notes: Vec::new(),
            guest_notes: Vec::new(),
            fewer_vcpus: None,
        };
        configuration.device(disk)?;
        configuration.image(disk)?;
        configuration.machine(vm, host);
        configuration.disk(vm, disk);
        configuration.lacking(vm, disk);
        configuration.polling(vm, disk);
        configuration.host_cpus(vm, disk, host);
        configuration.limits(disk);
        configuration.ceph(vm, disk);
        Ok(configuration)
    }

    /// Why the lab refuses this configuration, with what the user cannot see in the plan.
    pub fn explained(&self, why: String) -> String {
        match &self.fewer_vcpus {
            Some(fewer) if why.contains("vcpus") => format!("{why}; {fewer}"),
            _ => why,
        }
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
            // None of the lab's devices may stand for it: an IDE disk has one request in flight, and a SATA disk 32.
            Some(bus) => Err(format!(
                "the lab has no disks of the kind '{bus}', and a figure of another device would not be about this one"
            )),
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
        if disk.table.is_yes("disk.encrypted") {
            return Err("QEMU encrypts it, and the lab's images are not encrypted".into());
        }
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

    fn machine(&mut self, vm: &Vm, host: &Host) {
        let cpus = host.cpus;
        let table = &vm.table;
        match table.word("vm.machine") {
            _ if self.is_known("machine") => {}
            Some(name) if name.contains("q35") => self.take("machine", "q35"),
            Some(name) if name.starts_with("pc") => self.take("machine", "pc"),
            Some(name) => {
                let note = format!("machine=q35 stands for {name}");
                self.guest_notes.push(note);
            }
            None => {}
        }
        if let Some(vcpus) = table.number("vm.vcpus") {
            let bounded = vcpus.clamp(1, cpus.unwrap_or(VCPUS_MAX).min(VCPUS_MAX));
            self.take("vcpus", &bounded.to_string());
            if bounded < vcpus {
                let why = match cpus {
                    Some(cpus) if cpus < VCPUS_MAX => format!("this host has {cpus} CPUs"),
                    _ => "the lab's guests have no more".into(),
                };
                let note = format!("vcpus={bounded} instead of {vcpus}: {why}");
                self.guest_notes.push(note.clone());
                self.fewer_vcpus = Some(note);
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
        let hosts = ["host", "host-passthrough", "host-model", "max", "maximum"];
        if let Some(model) = table
            .word("vm.cpu-model")
            .filter(|model| !hosts.contains(model))
        {
            self.guest_notes.push(format!(
                "the lab's guest has the host's CPU model; this VM has {}",
                printable(model)
            ));
        }
        if let Some(os @ ("windows" | "other")) = table.word("vm.os") {
            let os = if os == "other" {
                "another system"
            } else {
                "Windows"
            };
            let note = format!("the lab's guest runs Linux; this VM runs {os}");
            self.guest_notes.push(note);
        }
        let own = match host.accel {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        };
        if let Some(accel) = table.word("vm.accel").filter(|accel| *accel != own) {
            let name = |accel| match accel {
                "kvm" => "KVM",
                "tcg" => "emulation (TCG)",
                "other" => "another accelerator",
                name => name,
            };
            let note = format!(
                "the lab's guest runs under {}; this VM under {}",
                name(own),
                printable(name(accel))
            );
            self.guest_notes.push(note);
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
        for (property, note) in [
            (
                "disk.packed",
                "the lab's disk has split virtqueues; this one has packed ones",
            ),
            (
                "disk.copy-on-read",
                "the lab's disk does not copy what is read from a backing file; this one does",
            ),
        ] {
            if table.is_yes(property) {
                self.notes.push(note.into());
            }
        }
    }

    /// Names the settings of the disk and its I/O threads that the lab does not have.
    fn lacking(&mut self, vm: &Vm, disk: &Disk) {
        let mut lacking = disk.others.clone();
        if disk.table.word("disk.ioeventfd") == Some("no") {
            lacking.push("ioeventfd=off".into());
        }
        if let Some(word @ ("on" | "unmap")) = disk.table.word("disk.detect-zeroes") {
            lacking.push(format!("detect-zeroes={word}"));
        }
        let sizes = disk.carried.block_sizes().into_iter();
        let sizes = sizes.filter_map(|(key, bytes)| Some((key, bytes.filter(|its| *its != 512)?)));
        lacking.extend(sizes.map(|(key, bytes)| format!("{key}={bytes}")));
        let threads = disk.threads.len() as u64;
        let takes_turns = |(number, thread): (u64, &ThreadUse)| {
            let mut queues = thread.queues.iter().flatten();
            queues.all(|queue| queue % threads == number)
        };
        if !(0..).zip(&disk.threads).all(takes_turns) {
            lacking.push("its own assignment of queues to I/O threads".into());
        }
        for thread in &vm.threads {
            if disk.threads.iter().any(|used| used.id == thread.id) {
                let of_thread = |setting: &String| format!("{setting} of {}", thread.id);
                lacking.extend(thread.others.iter().map(of_thread));
            }
        }
        if !lacking.is_empty() {
            self.notes.push(format!(
                "the lab's disk lacks settings of the VM's disk that may change its speed: {}",
                printable(&lacking.join(", "))
            ));
        }
    }

    /// How long the disk's I/O threads poll.
    fn polling(&mut self, vm: &Vm, disk: &Disk) {
        if !self.settings.has_iothreads() {
            return;
        }
        let is_own = |thread: &&Thread| disk.threads.iter().any(|used| used.id == thread.id);
        let own = vm.threads.iter().filter(is_own);
        let mut times: Vec<u64> = own
            .map(|thread| thread.poll_max_ns.unwrap_or(POLL_DEFAULT_NS))
            .collect();
        times.sort_unstable();
        times.dedup();
        match times[..] {
            [] => {}
            [POLL_DEFAULT_NS] => self.take("poll-max-us", "default"),
            [ns] => {
                let us = if ns == 0 { 0 } else { (ns / 1000).max(1) };
                self.take("poll-max-us", &us.to_string());
                if us * 1000 != ns {
                    self.notes.push(format!("poll-max-us={us} instead of {ns} ns"));
                }
            }
            _ => self.notes.push(
                "the lab's I/O threads poll as long as QEMU's default; this disk's for different times".into(),
            ),
        }
    }

    /// The CPUs of the host that the VM's threads may use, and for how long.
    fn host_cpus(&mut self, vm: &Vm, disk: &Disk, host: &Host) {
        let (of_vm, vcpus) = (&vm.cpus, vm.table.number("vm.vcpus").unwrap_or(1));
        let mut lists: Vec<&CpuList> = of_vm.vcpus.values().collect();
        let are_all = lists.len() as u64 >= vcpus;
        match &of_vm.every_vcpu {
            Some(list) if !are_all => lists.push(list),
            None if !are_all && !lists.is_empty() => {
                self.guest_notes.push(format!(
                    "the lab's vCPUs are not pinned; {} of this VM's {vcpus} are",
                    lists.len()
                ));
                lists.clear();
            }
            _ => {}
        }
        self.pin("vcpu-cpus", "a vCPU", &lists, host);
        if self.settings.has_iothreads() {
            let own = disk.threads.iter();
            let lists = own.map(|used| of_vm.threads.get(&used.id));
            let lists: Option<Vec<&CpuList>> = lists.collect();
            self.pin(
                "server-cpus",
                "an I/O thread",
                &lists.unwrap_or_default(),
                host,
            );
        } else if let Some(cpus) = &of_vm.emulator {
            self.guest_notes.push(format!(
                "QEMU's main loop is not pinned in the lab; this VM's may use the CPUs {}",
                cpus
            ));
        }
        if let Some(cpus) = &of_vm.process {
            self.guest_notes.push(format!(
                "the lab's guest may use all CPUs; this VM may use {}",
                cpus
            ));
        }
        let quotas = of_vm.quotas.iter();
        let quotas: Vec<String> = quotas
            .map(|(setting, percent)| format!("{setting}, {percent} % of a CPU for each thread"))
            .collect();
        if !quotas.is_empty() {
            self.guest_notes.push(format!(
                "without the VM's limits on CPU time ({}), so it may not reach the measured speeds",
                printable(&quotas.join("; "))
            ));
        }
    }

    /// Pins threads to all CPUs of these lists. The lab gives each thread one of them.
    fn pin(&mut self, key: &str, thread: &str, lists: &[&CpuList], host: &Host) {
        let cpus: Vec<BTreeSet<u32>> = lists.iter().map(|list| list.cpus()).collect();
        let all: BTreeSet<u32> = cpus.iter().flatten().copied().collect();
        let Some(last) = all.last() else {
            return;
        };
        let text = cpus::text_of(&all);
        if let Some(count) = host.cpus.filter(|count| u64::from(*last) >= *count) {
            return self.guest_notes.push(format!(
                "{key}={}, because this host has {count} CPUs; the VM's are {text}",
                self.value(key)
            ));
        }
        self.take(key, &text);
        if cpus.iter().any(|own| own.len() > 1) {
            self.guest_notes.push(format!(
                "{key}={text}: {thread} of the lab has one of these CPUs; one of the VM may use several"
            ));
        }
    }

    /// The limits of the disk, which the lab has only for disks of ringdisk.
    fn limits(&mut self, disk: &Disk) {
        let limits = disk.carried.limits.iter();
        let limits = limits.map(|(limit, value)| (limit.name(Dialect::Ringdisk), value));
        let limits: Vec<String> = limits
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let group = disk.carried.group.as_deref().map(printable);
        match (&limits[..], &group) {
            ([one], None) if self.value("device") == "vhost-user-blk" => {
                if let Some(iops) = one.strip_prefix("iops=") {
                    return self.take("iops", iops);
                }
            }
            _ => {}
        }
        if limits.is_empty() && group.is_none() && !disk.table.is_yes("disk.throttled") {
            return;
        }
        let mut words = limits;
        words.extend(group.map(|group| format!("group={group}")));
        let words = match &words[..] {
            [] => String::new(),
            words => format!(" ({})", words.join(", ")),
        };
        self.notes.push(format!(
            "without the limits of the VM's disk{words}, so it may not reach the measured speeds"
        ));
    }

    fn ceph(&mut self, vm: &Vm, disk: &Disk) {
        let is_librbd = disk.table.word("disk.protocol") == Some("rbd");
        match vm.table.word("vm.malloc").filter(|_| is_librbd) {
            None => {}
            Some("glibc") => self.take("preload", "default"),
            Some(name) => match library("librbd", name) {
                Ok(file) => self.take("preload", &file),
                Err(why) => self
                    .notes
                    .push(format!("with the C library's allocator: {why}")),
            },
        }
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
        if !access.options.is_empty() {
            let words = access.options.iter();
            let words: Vec<String> = words.map(|(key, value)| format!("{key}={value}")).collect();
            self.take("ceph-options", &words.join(" "));
        }
        if access.has_key && access.keyring.is_none() {
            let user = printable(access.user.as_deref().unwrap_or("admin"));
            self.notes.push(format!(
                "the VM has the key of client.{user} from its own configuration or a secret; the lab reads it from Ceph's \
                 keyrings, or from ceph-keyring=FILE"
            ));
        }
    }
}
