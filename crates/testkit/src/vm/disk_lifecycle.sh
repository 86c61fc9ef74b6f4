# $device is the disk, $block_size the file system's. Each step ends with a line that the host waits for.
ok() { echo "ok $1"; }
remount() { umount /mnt; echo 3 >/proc/sys/vm/drop_caches; mount "$@" ${device}1 /mnt; }

# A disk that likes larger I/O than 1 MiB would have its first partition further back.
printf 'label: gpt\nfirst-lba: 2048\ngrain: 1MiB\nstart=2048\n' | sfdisk --quiet $device
[ -b ${device}1 ]
ok partition

mkfs.ext4 -q -b $block_size ${device}1
mount ${device}1 /mnt
ok format

mkdir /mnt/files
for i in 1 2 3 4 5 6 7 8; do head -c ${i}00003 /dev/urandom >/mnt/files/$i; done
for i in $(seq 200); do echo "small $i" >/mnt/files/small$i; done
cp -r /mnt/files /mnt/copy
(cd /mnt/files && sha256sum *) >/tmp/sums
sync
ok copy

remount
(cd /mnt/files && sha256sum -cs /tmp/sums)
(cd /mnt/copy && sha256sum -cs /tmp/sums)
ok verify

# until there is no space left
dd if=/dev/zero of=/mnt/filler bs=1M 2>/tmp/full && exit 1
grep -q 'No space left' /tmp/full
sync
ok fill

rm -r /mnt/filler /mnt/copy
sync
fstrim /mnt
ok discard

remount -o discard
(cd /mnt/files && sha256sum -cs /tmp/sums)
ok verify-again
