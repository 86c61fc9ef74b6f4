//! Images of every kind, made with qemu-img and qemu-io.

use std::path::Path;

use crate::qemu_img as qemu;
use crate::random::Random;

/// A kind of image.
pub struct Variant {
    /// The name of the kind.
    pub name: &'static str,
    /// Options for `qemu-img create`.
    options: &'static str,
    /// The size of the disk in bytes.
    size: u64,
    /// The backing files, as options and size in bytes; the lowest is last.
    backing: &'static [(&'static str, u64)],
    /// Some clusters are compressed.
    compressed: bool,
    /// The image has internal snapshots, with writes between them.
    snapshots: bool,
    /// The image has persistent bitmaps.
    bitmaps: bool,
}

const PLAIN: Variant = Variant {
    name: "",
    options: "",
    size: 1 << 20,
    backing: &[],
    compressed: false,
    snapshots: false,
    bitmaps: false,
};

/// All kinds of images.
pub const ALL: &[Variant] = &[
    Variant {
        name: "default",
        size: 3 << 20,
        ..PLAIN
    },
    Variant {
        name: "v2",
        options: "compat=0.10",
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "v2_backing",
        options: "compat=0.10,cluster_size=4k",
        backing: &[("raw", 700 << 10)],
        ..PLAIN
    },
    Variant {
        name: "cluster_512",
        options: "cluster_size=512",
        compressed: true,
        snapshots: true,
        ..PLAIN
    },
    Variant {
        name: "cluster_2m",
        options: "cluster_size=2M",
        size: 7 << 20,
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "refcount_1",
        options: "cluster_size=4k,refcount_bits=1",
        compressed: false,
        ..PLAIN
    },
    Variant {
        name: "refcount_2",
        options: "cluster_size=4k,refcount_bits=2",
        compressed: false,
        ..PLAIN
    },
    Variant {
        name: "refcount_4",
        options: "cluster_size=1k,refcount_bits=4",
        snapshots: true,
        ..PLAIN
    },
    Variant {
        name: "refcount_8",
        options: "cluster_size=4k,refcount_bits=8",
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "refcount_32",
        options: "cluster_size=512,refcount_bits=32",
        ..PLAIN
    },
    Variant {
        name: "refcount_64",
        options: "cluster_size=512,refcount_bits=64",
        snapshots: true,
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "zstd",
        options: "compression_type=zstd,cluster_size=16k",
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "subclusters",
        options: "extended_l2=on,cluster_size=32k",
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "subclusters_backing",
        options: "extended_l2=on,cluster_size=64k",
        backing: &[("cluster_size=4k", 1 << 20)],
        snapshots: true,
        ..PLAIN
    },
    Variant {
        name: "subclusters_16k",
        options: "extended_l2=on,cluster_size=16k",
        backing: &[("raw", 3 << 20)],
        bitmaps: true,
        ..PLAIN
    },
    Variant {
        name: "lazy",
        options: "lazy_refcounts=on,cluster_size=4k",
        ..PLAIN
    },
    Variant {
        name: "metadata",
        options: "preallocation=metadata,cluster_size=8k",
        ..PLAIN
    },
    Variant {
        name: "full",
        options: "preallocation=full,cluster_size=8k",
        ..PLAIN
    },
    Variant {
        name: "subclusters_metadata",
        options: "preallocation=metadata,extended_l2=on,cluster_size=16k",
        ..PLAIN
    },
    Variant {
        name: "backing_raw",
        options: "cluster_size=16k",
        backing: &[("raw", 1 << 20)],
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "backing_shorter",
        options: "cluster_size=8k",
        size: 2 << 20,
        backing: &[("cluster_size=512", 300 << 10)],
        ..PLAIN
    },
    Variant {
        name: "backing_longer",
        options: "cluster_size=8k",
        backing: &[("cluster_size=64k", 2 << 20)],
        snapshots: true,
        ..PLAIN
    },
    Variant {
        name: "deep",
        options: "cluster_size=4k",
        size: 1 << 20,
        backing: &[
            ("cluster_size=8k", 512 << 10),
            ("extended_l2=on,cluster_size=16k", 2 << 20),
            ("compat=0.10", 1 << 20),
            ("raw", 900 << 10),
        ],
        ..PLAIN
    },
    Variant {
        name: "data_file",
        options: "data_file=data,cluster_size=16k",
        ..PLAIN
    },
    Variant {
        name: "data_file_raw",
        options: "data_file=data,data_file_raw=on,cluster_size=4k",
        ..PLAIN
    },
    Variant {
        name: "data_file_raw_subclusters",
        options: "data_file=data,data_file_raw=on,extended_l2=on,cluster_size=16k",
        ..PLAIN
    },
    Variant {
        name: "data_file_subclusters",
        options: "data_file=data,extended_l2=on,cluster_size=16k",
        backing: &[("raw", 1 << 20)],
        ..PLAIN
    },
    Variant {
        name: "snapshots",
        options: "cluster_size=4k",
        snapshots: true,
        compressed: true,
        ..PLAIN
    },
    Variant {
        name: "bitmaps",
        options: "cluster_size=4k",
        bitmaps: true,
        ..PLAIN
    },
    Variant {
        name: "odd_size",
        options: "cluster_size=64k",
        size: (1 << 20) + 37 * 512,
        backing: &[("raw", (1 << 20) + 512)],
        ..PLAIN
    },
];

impl Variant {
    /// Whether the image can be grown.
    pub fn grows(&self) -> bool {
        !(self.snapshots && self.options.contains("0.10"))
    }

    /// Whether the image has internal snapshots.
    pub fn has_snapshots(&self) -> bool {
        self.snapshots
    }

    /// Whether the image has persistent bitmaps.
    pub fn bitmaps(&self) -> bool {
        self.bitmaps
    }

    /// Whether guest data and tables are in the same file.
    pub fn is_one_file(&self) -> bool {
        !self.is_external()
    }

    /// Whether the file is small enough to be read thousands of times.
    pub fn is_small(&self) -> bool {
        self.size <= 2 << 20
    }

    /// Whether the data file is a raw image of the disk.
    pub fn has_raw_data_file(&self) -> bool {
        self.options.contains("data_file_raw=on")
    }

    fn is_external(&self) -> bool {
        self.options.contains("data_file")
    }

    /// Creates `disk.qcow2`, and the files that it needs, in a directory.
    pub fn make(&self, directory: &Path, seed: u64) {
        self.make_sized(directory, seed, self.size);
    }

    /// As `make`, for a disk of another size.
    ///
    /// # Panics
    /// qemu-img or qemu-io fail.
    pub fn make_sized(&self, directory: &Path, seed: u64, size: u64) {
        let mut random = Random(seed);
        let mut below: Option<(String, &str)> = None;
        for (number, (options, size)) in self.backing.iter().enumerate().rev() {
            let file = format!("base{number}");
            let format = if *options == "raw" { "raw" } else { "qcow2" };
            let options = if *options == "raw" { "" } else { options };
            create(directory, &file, format, options, *size, below.as_ref());
            write(directory, &file, format, *size, &mut random, false);
            below = Some((file, format));
        }
        let disk = "disk.qcow2";
        create(directory, disk, "qcow2", self.options, size, below.as_ref());
        let fill = |random: &mut Random| {
            let compressed = self.compressed && !self.is_external();
            write(directory, disk, "qcow2", size, random, compressed);
        };
        fill(&mut random);
        if self.bitmaps {
            qemu::img(directory, "bitmap --add -g 4k disk.qcow2 enabled");
            qemu::img(directory, "bitmap --add --disable disk.qcow2 disabled");
            fill(&mut random);
        }
        if self.snapshots {
            for name in ["one", "two"] {
                qemu::img(directory, &format!("snapshot -c {name} {disk}"));
                fill(&mut random);
            }
            qemu::img(directory, &format!("snapshot -c three {disk}"));
        }
    }
}

fn create(
    directory: &Path,
    file: &str,
    format: &str,
    options: &str,
    size: u64,
    below: Option<&(String, &str)>,
) {
    let mut args = format!("create -q -f {format}");
    if !options.is_empty() {
        args += &format!(" -o {options}");
    }
    if let Some((base, format)) = below {
        args += &format!(" -b {base} -F {format}");
    }
    qemu::img(directory, &format!("{args} {file} {size}"));
}

/// Writes patterns all over the disk.
fn write(directory: &Path, file: &str, format: &str, size: u64, random: &mut Random, packed: bool) {
    let mut commands = Vec::new();
    for number in 0..12 {
        let (at, len) = random.range(size, 65536);
        let pattern = 1 + random.below(250);
        commands.push(match number % 6 {
            4 => format!("write -z {at} {len}"),
            5 => format!("discard {at} {len}"),
            _ => format!("write -P {pattern} {at} {len}"),
        });
    }
    qemu::io(directory, file, &["-f", format, "-d", "unmap"], &commands);
    if packed {
        // Each command writes a whole cluster.
        let cluster = cluster_of(directory, file);
        let mut commands = Vec::new();
        for _ in 0..6 {
            let at = random.below(size / cluster) * cluster;
            let len = cluster.min(size - at);
            // A cluster can only be written compressed if it is not allocated.
            commands.push(format!("discard {at} {len}"));
            commands.push(format!("write -c -P {} {at} {len}", 1 + random.below(250)));
        }
        qemu::io(directory, file, &["-f", format, "-d", "unmap"], &commands);
    }
}

fn cluster_of(directory: &Path, file: &str) -> u64 {
    let header = std::fs::read(directory.join(file)).unwrap();
    1 << header[23]
}
