# Makes a disk with a small Debian whose PID 1 is systemd. Runs as root; see debian.rs.
codename=$1 mirror=$2 packages=$3 target=$4 owner=$5
folder=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$folder"' EXIT
root=$folder/root
debootstrap --variant=minbase --include="$packages" "$codename" "$root" "$mirror" >"$folder/log" 2>&1 || {
    tail -5 "$folder/log" >&2
    exit 1
}

# To save space.
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* \
    "$root"/usr/share/man/* "$root"/usr/share/locale/* "$root"/usr/share/zoneinfo
# The guest has no terminal and no network, and needs no maintenance.
systemctl --quiet --root="$root" mask serial-getty@ttyS0.service getty@tty1.service apt-daily.timer \
    apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer systemd-logind.service
echo guest >"$root/etc/hostname"
ln -s /lib/systemd/systemd "$root/init"

# After booting, unpack the archive on the disk with the serial `script`, and run its script.
cat >"$root/etc/systemd/system/script.service" <<'END'
[Unit]
After=multi-user.target
[Service]
ExecStart=/usr/local/sbin/script
[Install]
WantedBy=graphical.target
END
cat >"$root/usr/local/sbin/script" <<'END'
#!/bin/sh
stty -F /dev/ttyS1 raw -echo
exec </dev/null >/dev/ttyS1 2>&1
mkdir /script
tar --extract --no-same-owner --directory=/script --file=/dev/disk/by-id/virtio-script && sh -eu /script/script.sh
echo "vm-exit: $?"
systemctl poweroff -ff >/dev/null 2>&1
END
chmod 755 "$root/usr/local/sbin/script"
systemctl --quiet --root="$root" enable script.service

mke2fs -q -t ext4 -d "$root" "$folder/disk" 1G
chown "$owner" "$folder/disk"
mv "$folder/disk" "$target"
