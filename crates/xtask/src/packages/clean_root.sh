# Builds or installs a package in a small Debian. Runs as root in a mount namespace of its own; see clean_root.rs.
step=$1 suite=$2 root=$3 mirror=$4 packages=$5 version=$6
shift 6

# The root without what this script adds is kept; each run begins with a copy.
base=$root.base
if [ ! -e "$base/complete" ]; then
    rm -rf "$base"
    echo "making a clean root of $suite"
    mkdir -p "$base"
    debootstrap --variant=minbase --include="$packages" "$suite" "$base/root" "$mirror" >"$base/log" 2>&1 || {
        tail -5 "$base/log" >&2
        exit 1
    }
    touch "$base/complete"
fi
rm -rf "$root"
trap 'umount -l "$root" 2>/dev/null || true; rm -rf "$root"' EXIT
cp -a --reflink=auto "$base/root" "$root"
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mkdir -p "$root/run/shm"
cp /etc/resolv.conf "$root/etc/resolv.conf"
# Where this host has its mirror, and how it reaches it.
for name in /etc/apt/apt.conf /etc/apt/apt.conf.d/*proxy* /etc/apt/auth.conf.d; do
    [ ! -e "$name" ] || cp -a "$name" "$root${name%/*}/"
done

inside() { env -i PATH=/rust/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"; }
bind() {
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
}

case $step in
build)
    bind "$1" /rust
    bind "$2" /cargo
    bind "$3" /src
    bind "$4" /target
    bind "$5" /output
    bind "$6" /cache/ringdisk
    # Nothing is fetched, and the lock file decides.
    inside env CARGO_HOME=/cargo CARGO=/rust/bin/cargo CARGO_TARGET_DIR=/target CARGO_NET_OFFLINE=true XDG_CACHE_HOME=/cache \
        sh -euc 'cd /src && exec cargo xtask deb --version "$1" --output /output' sh "$version"
    ;;
install)
    cp "$1" "$root/tmp/ringdisk.deb"
    inside sh -euc '
        apt-get update -qq
        apt-get install -qq -y --no-install-recommends /tmp/ringdisk.deb >/tmp/log 2>&1 || { tail -20 /tmp/log >&2; exit 1; }
        [ "$(ringdisk --version)" = "ringdisk $1" ] || { ringdisk --version >&2; exit 1; }
        truncate -s 64M /tmp/disk.raw
        mkdir -p /run/ringdisk
        ringdisk serve /tmp/disk.raw,name=disk >/tmp/serve 2>&1 &
        for try in $(seq 100); do ! ringdisk list >/tmp/list 2>&1 || break; sleep 0.1; done
        grep -q "^disk " /tmp/list || { cat /tmp/list /tmp/serve >&2; exit 1; }
        kill $!; wait $!
    ' sh "$version"
    ;;
esac
