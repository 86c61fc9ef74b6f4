# fio on the file system that disk_lifecycle.sh left mounted. The host reads its CPU clocks at fio-start and fio-end.
job() {
    name=$1
    shift
    echo "fio-start $name"
    fio --eta=never --name=$name --filename=/mnt/fio --size=48M --direct=1 --ioengine=libaio --bs=4k \
        --output-format=terse --terse-version=3 "$@" >/tmp/fio || { cat /tmp/fio; exit 1; }
    echo "fio-end $name $(grep '^3;' /tmp/fio)"
}

dd if=/dev/zero of=/mnt/fio bs=1M count=48 conv=fsync 2>/dev/null
job randread-depth-32 --rw=randread --iodepth=32 --time_based --runtime=8
job randwrite-depth-32 --rw=randwrite --iodepth=32 --time_based --runtime=8
job randread-depth-1 --rw=randread --iodepth=1 --time_based --runtime=5
echo 'ok fio'

fio --eta=never --name=verify --filename=/mnt/verify --size=16M --direct=1 --ioengine=libaio --bs=4k --iodepth=16 \
    --rw=randwrite --verify=crc32c --output=/tmp/fio || { cat /tmp/fio; exit 1; }
echo 'ok fio-verify'
umount /mnt
