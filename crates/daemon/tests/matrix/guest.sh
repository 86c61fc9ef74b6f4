# What a guest of the matrix does. Its data disks have serials that say what they are to be: packed-4-256 has 4 packed
# rings. After each part it prints `done PART`; where it prints something else, the host has to do that.
sizes() { for serial in $data; do blockdev --getsize64 $(disk $serial); done | tr '\n' ' '; }
in_flight() { set -- $(cat /sys/block/$(basename $(disk $1))/inflight); echo $(($1 + $2)); }
is_there() { [ -n "$(disk $1 2>/dev/null)" ]; }
check_files() {
    for serial in $data; do
        mount $(disk $serial)1 /mnt
        (cd /mnt/files && sha256sum -cs /sums.$serial)
        umount /mnt
    done
}
check_rings() {
    name=$(basename $(disk $1))
    case $1 in packed*) packed=1 ;; *) packed=0 ;; esac
    queues=${1#*-}
    [ $(cut -c35 /sys/block/$name/device/features) = $packed ] || { echo "$1: the wrong kind of rings"; exit 1; }
    [ $(ls /sys/block/$name/mq | wc -l) = ${queues%-*} ] || { echo "$1: the wrong number of queues"; exit 1; }
}
# Writes to all data disks at once, behind what they were at first, and reads it back.
load() {
    at=$1; shift
    fio --eta=never --offset=$at --size=2M --direct=1 --ioengine=libaio --bs=4k --iodepth=32 --thread --rw=randwrite \
        --randseed=7 --verify=crc32c --output=/tmp/fio "$@" \
        $(for serial in $data; do echo --name=$serial --filename=$(disk $serial); done) || { cat /tmp/fio; exit 1; }
}

# The host makes the disks slow, and tells it by another size. Then there is a load, and the host is told $2 once much of
# it is in flight.
slow_load() {
    before=$(sizes)
    echo slow
    until [ "$(sizes)" != "$before" ]; do sleep 0.1; done
    load $1 &
    loading=$!
    for serial in $data; do until [ $(in_flight $serial) -ge 8 ]; do sleep 0.1; done; done
    echo $2
    wait $loading
}

echo # ends what the firmware has written to the same port
grep -q '^/dev/vd.1 / ext4' /proc/mounts || { echo 'the root is elsewhere'; exit 1; }
data=$(for serial in /sys/block/vd*/serial; do echo $(cat $serial); done | grep -v boot)
if [ -e /was-here ]; then
    check_files
    load 80M --verify_only
    sync
    mount -o remount,ro /
    echo done reset
    exit
fi
echo done boot

for serial in $data; do
    check_rings $serial
    life $serial
    umount /mnt
    cp /tmp/sums /sums.$serial
done
echo done life

# They become longer one after the other.
echo resize
for serial in $data; do
    until [ $(blockdev --getsize64 $(disk $serial)) -gt 67108864 ]; do sleep 0.1; done
done
echo done resize

echo unplug
for serial in $data; do while is_there $serial; do sleep 0.1; done; done
echo plug
for serial in $data; do until is_there $serial; do sleep 0.1; done; done
# The device is there a moment before its partition.
for serial in $data; do until [ -b $(disk $serial)1 ]; do sleep 0.1; done; check_rings $serial; done
check_files
echo done plug

slow_load 80M kill
check_files
echo done kill

touch /was-here
sync
slow_load 90M reset
sleep 60
