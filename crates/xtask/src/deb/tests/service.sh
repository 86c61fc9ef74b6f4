# Runs as root in a Debian with systemd, with `sh -eu`. Its folder has old.deb, new.deb, image.qcow2, disk_io and probe.pl.
# The service uses the disk with the serial `device`. The host checks that each step has printed its line.
cd /script
exec 2>/run/trace
set -x
trap 'status=$?; [ $status = 0 ] || report' EXIT
report() {
    set +x
    echo '--- commands:'; tail -n 6 /run/trace
    echo '--- status:'; systemctl status ringdisk --no-pager -n 0 2>&1 | head -n 12 || true
    echo '--- journal:'; journalctl -b -u ringdisk -o short-monotonic --no-pager | grep -v ']:  ' | tail -n 40
}
seconds() { echo "at $(cut -d . -f 1 /proc/uptime) s: $1"; }
ok() { seconds 'done'; echo "ok: $1"; }

# ---- functions

is() { systemctl show ringdisk --value --property "$1"; }
disks() { echo $(ringdisk list --json | grep -o '"name":"[^"]*"' | cut -d '"' -f 4 | sort); }
processes() { for exe in /proc/[0-9]*/exe; do readlink "$exe" || true; done | grep -c '^/usr/bin/ringdisk' || true; }
# Waits, because journald writes later. Ignores messages from before $since.
since=$(date '+%F %T')
says() { wait_for "journalctl -b -u ringdisk -o cat --no-pager --since '$since' | grep -qF -e '$1'"; }
wait_for() {
    for try in $(seq 240); do
        if eval "$1"; then return; fi
        sleep 0.5
    done
    echo "never: $1"
    return 1
}
serves() {
    [ "$(systemctl is-active ringdisk)" = active ]
    [ "$(disks)" = "$1" ]
    for disk in $1; do
        socket=/run/ringdisk/$disk.sock
        grep -qF "${socket%/*}/*.sock rw," /etc/apparmor.d/abstractions/libvirt-qemu.d/ringdisk
        [ "$(stat -c '%F %U:%G %A' $socket)" = 'socket ringdisk:kvm srw-rw----' ]
    done
}
# Runs a command with the rights of QEMU.
in_kvm() { setpriv --reuid=nobody --regid=kvm --clear-groups "$@"; }
disk_io() { in_kvm ./disk_io "$1" "/run/ringdisk/$2.sock" "$3"; }
config() { cat >/etc/ringdisk/ringdisk.toml; }
disk() { printf '[[disk]]\nname = "%s"\nfile = "%s"\n' "$1" "$2"; }
new_file() { truncate -s 64M "/var/lib/ringdisk/$1"; chown ringdisk "/var/lib/ringdisk/$1"; }

# ---- installation

seconds 'the system is up'
mkdir -p /usr/lib/modules # so that the unit has something to hide

dpkg -i old.deb >/run/dpkg
[ "$(systemctl is-enabled ringdisk)" = enabled ]
serves ''
[ "$(stat -c '%U:%G %a' /run/ringdisk)" = 'ringdisk:kvm 750' ]
[ "$(stat -c '%U:%G %a' /var/lib/ringdisk)" = 'ringdisk:kvm 750' ]
[ "$(getent passwd ringdisk | cut -d : -f 6,7)" = /var/lib/ringdisk:/usr/sbin/nologin ]
additions=/etc/apparmor.d/local/abstractions/libvirt-qemu
grep -q '^include if exists <abstractions/libvirt-qemu.d> # ringdisk$' $additions
# systemd ignores settings that it does not know, with a warning.
[ -z "$(systemd-analyze verify --man=no ringdisk.service 2>&1 | grep -F ringdisk.service)" ]
# Every VM of the host runs it, also those without ringdisk's disks.
hook=/etc/libvirt/hooks/qemu.d/ringdisk
for step in 'prepare begin' 'release end'; do
    [ -z "$(echo '<domain><name>vm</name></domain>' | $hook vm $step -)" ]
done
ok 'the package is installed, and its service runs'

# ---- disks, which exist when systemctl returns

device=$(readlink -f /dev/disk/by-id/virtio-device)
new_file file.raw
cp image.qcow2 /var/lib/ringdisk
chown ringdisk /var/lib/ringdisk/image.qcow2
three() { disk device "$device"; disk file /var/lib/ringdisk/file.raw; disk image /var/lib/ringdisk/image.qcow2; }
three | config
systemctl restart ringdisk
serves 'device file image'
[ "$(ringdisk list --json | grep -o '"aio":"io_uring"' | wc -l)" = 3 ]
for disk in device file image; do
    disk_io write $disk 1 </dev/null
    disk_io verify $disk 1
done
if setpriv --reuid=nobody --regid=nogroup --clear-groups ./disk_io verify /run/ringdisk/file.sock 1 2>/run/refused; then
    exit 1
fi
grep -q 'Permission denied' /run/refused
ok 'members of group kvm can use disks in a file, an image and a block device, with io_uring'

# ---- restrictions of the unit

confined() {
    pid=$1
    status() { sed -n "s/^$1:[[:space:]]*//p" /proc/$pid/status; }
    [ "$(status Uid | cut -f 1)" = "$(id -u ringdisk)" ]
    [ "$(status Gid | cut -f 1)" = "$(getent group kvm | cut -d : -f 3)" ]
    case " $(status Groups) " in *" $(getent group disk | cut -d : -f 3) "*) ;; *) return 1 ;; esac
    for set in CapInh CapPrm CapEff CapBnd CapAmb; do [ "$(status $set)" = 0000000000000000 ]; done
    [ "$(status NoNewPrivs) $(status Seccomp) $(status Umask)" = '1 2 0007' ]
    # ringdisk's own sandbox applies as well. Its log lines have no time, because the journal has one.
    journalctl -b _PID=$pid -o cat --no-pager >/run/logged
    grep -q "^sandbox: files: disks in $device, /var/lib/ringdisk" /run/logged
    grep -q '^sandbox: [0-9]* system calls; capabilities: none' /run/logged
    grep -q '^Max open files  *1048576  *1048576 ' /proc/$pid/limits
    grep -q '^Max locked memory  *unlimited ' /proc/$pid/limits
    [ "$(cat /proc/$pid/oom_score_adj)" = -900 ]
    [ "$(readlink /proc/$pid/ns/uts)" != "$(readlink /proc/1/ns/uts)" ]
    # Read-only even for root.
    for place in /usr /boot /etc /proc/sys /sys /sys/fs/cgroup; do
        nsenter --target $pid --mount findmnt --noheadings --output OPTIONS --target $place | tail -n 1 | grep -q '^ro\b'
    done
    nsenter --target $pid --mount findmnt --noheadings --output OPTIONS /proc | tail -n 1 | grep -q hidepid=invisible
    for place in /dev/kmsg /usr/lib/modules; do
        [ "$(nsenter --target $pid --mount stat -c %a $place)" = 0 ]
    done
}
confined "$(is MainPID)"

# Outside the unit, nothing is forbidden.
setpriv --reuid=ringdisk --regid=kvm --clear-groups perl probe.pl /var/lib/ringdisk/free /var/lib/ringdisk
[ -z "$(grep -v ': works$' /var/lib/ringdisk/free)" ]
mkdir -p /run/systemd/system/ringdisk.service.d
printf '[Service]\nExecStartPre=perl /script/probe.pl /var/lib/ringdisk/probed /var/lib/ringdisk\n' \
    >/run/systemd/system/ringdisk.service.d/probe.conf
systemctl daemon-reload
systemctl restart ringdisk
rm -r /run/systemd/system/ringdisk.service.d
systemctl daemon-reload
cat >/run/expected <<'END'
memory to write and execute: Operation not permitted
memory to write: works
netlink: Address family not supported by protocol
unix: works
inet: works
inet6: works
a namespace: Operation not permitted
another personality: Operation not permitted
to be traced: Operation not permitted
set-user-ID: Operation not permitted
io_uring: works
Linux AIO: works
CPU affinity: works
END
diff /run/expected /var/lib/ringdisk/probed
serves 'device file image'
ok 'the restrictions of the unit apply'

# ---- reload, while a guest reads and writes

pid=$(is MainPID)
mkfifo /run/end
disk_io load file 2 </run/end &
load=$!
exec 3>/run/end
new_file added.raw
{ three; disk added /var/lib/ringdisk/added.raw; } | config
systemctl reload ringdisk
serves 'added device file image'
disk_io write added 3 </dev/null
new_file kept.raw
ringdisk attach file=/var/lib/ringdisk/kept.raw,name=kept
[ "$(is MainPID)" = "$pid" ]
ok 'a reload adds a disk'

{ three; echo 'queues = "two"'; } | config
if systemctl reload ringdisk; then exit 1; fi
says '/etc/ringdisk/ringdisk.toml, line 10: queues'
systemctl status ringdisk --no-pager | grep -qF '/etc/ringdisk/ringdisk.toml, line 10: queues'
journalctl -b -u ringdisk -p err -o cat --no-pager | grep -qF '/etc/ringdisk/ringdisk.toml, line 10: queues'
serves 'added device file image kept'
[ "$(is MainPID)" = "$pid" ]
ok 'a reload with an error changes nothing'

# ---- upgrade

dpkg -i new.deb >/run/dpkg
seconds 'the program is replaced'
[ "$(is MainPID)" = "$pid" ]
if systemctl reload ringdisk; then exit 1; fi
serves 'added device file image kept'
[ "$(is MainPID)" = "$pid" ]
three | config
systemctl reload ringdisk
wait_for '[ "$(is MainPID)" != "$pid" ]'
wait_for '[ "$(processes)" = 1 ]'
# The new process removes the disk that is no longer configured.
wait_for '[ "$(disks)" = "device file image kept" ]'
serves 'device file image kept'
[ ! -e /run/ringdisk/added.sock ]
confined "$(is MainPID)"
[ "$(is NRestarts) $(is Result)" = '0 success' ]
# Another reload keeps the process, as before the upgrade.
pid=$(is MainPID)
systemctl reload ringdisk
[ "$(is MainPID)" = "$pid" ]
exec 3>&-
wait $load
ok 'a reload starts the new version'

# An upgrade from outside would start a process that does not belong to the service. The service would end with the old
# process.
elsewhere() {
    if "$@" ringdisk upgrade --control=/run/ringdisk/control.qmp 2>/run/refused; then exit 1; fi
    grep -q 'systemctl reload' /run/refused
    [ "$(is MainPID)" = "$pid" ]
    serves 'device file image kept'
}
elsewhere env
elsewhere setpriv --reuid=ringdisk --regid=kvm --clear-groups
ok 'only systemd upgrades its service'

# ---- a kill

disk_io write image 4 </run/end >/run/written &
writes=$!
exec 3>/run/end
wait_for 'grep -q written /run/written'
since=$(date '+%F %T')
kill -9 "$pid"
wait_for '[ "$(is NRestarts)" = 1 ]'
wait_for '[ "$(systemctl is-active ringdisk)" = active ]'
serves 'device file image kept'
says 'from the journal of a killed process'
disk_io verify image 4
exec 3>&-
wait $writes
confined "$(is MainPID)"
ok 'the service restarts after a kill, with all data'

# Nor does a start that fails take what was acknowledged.
disk_io write image 5 </run/end >/run/written &
writes=$!
exec 3>/run/end
wait_for 'grep -q written /run/written'
{ three; echo 'queues = "two"'; } | config
systemctl kill -s KILL ringdisk
wait_for '[ "$(is ActiveState) $(is ExecMainStatus)" = "failed 2" ]'
[ -n "$(find /run/ringdisk/journals -name '*.journal')" ]
three | config
since=$(date '+%F %T')
systemctl start ringdisk
says 'from the journal of a killed process'
disk_io verify image 5
exec 3>&-
wait $writes
ok 'a start that fails after a kill keeps the journals'

# ---- stop and removal

systemctl stop ringdisk
[ "$(is ActiveState) $(is Result) $(is ExecMainStatus)" = 'inactive success 0' ]
[ -z "$(find /run/ringdisk ! -type d)" ]
[ "$(processes)" = 0 ]
ok 'the service stops'

{ three; echo 'queues = "two"'; } | config
since=$(date '+%F %T')
if systemctl start ringdisk; then exit 1; fi
[ "$(is ActiveState) $(is ExecMainStatus) $(is NRestarts)" = 'failed 2 0' ]
says '/etc/ringdisk/ringdisk.toml, line 10: queues'
three | config
systemctl start ringdisk
serves 'device file image kept'
disk_io verify image 5
ok 'systemd does not restart it after a configuration error'

dpkg -r ringdisk >/run/dpkg
[ "$(processes)" = 0 ]
[ -z "$(find /run/ringdisk ! -type d)" ]
[ -e /etc/ringdisk/ringdisk.toml ]
dpkg -P ringdisk >/run/dpkg
[ ! -e /etc/ringdisk ]
[ ! -e /etc/apparmor.d/abstractions/libvirt-qemu.d/ringdisk ]
if grep ringdisk $additions; then exit 1; fi
[ "$(is LoadState)" = not-found ]
[ -e /var/lib/ringdisk/file.raw ]
ok 'removing the package leaves only the disks'
