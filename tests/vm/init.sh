#!/bin/busybox sh
# First process of the guest: the host's files read-only, fresh file systems where something is written.
/bin/busybox mkdir -p /dev /proc /lower /host
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs devtmpfs /dev
# Nothing is built in; the file lists the modules of the shared file system in the order in which they load.
while read -r module; do
    /bin/busybox insmod "/modules/$module"
done </modules/order
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=262144,cache=loose root /host
/bin/busybox mount --bind /host /lower
/bin/busybox mount -t proc proc /host/proc
/bin/busybox mount -t sysfs sysfs /host/sys
/bin/busybox mount -t devtmpfs devtmpfs /host/dev
for directory in tmp run var/lib; do
    /bin/busybox mount -t tmpfs -o mode=0755 tmpfs "/host/$directory"
done
/bin/busybox chmod 1777 /host/tmp
# What the tests are made of may lie below a directory that was just covered.
while read -r path; do
    if [ ! -d "/host$path" ]; then
        /bin/busybox mkdir -p "/host$path"
        /bin/busybox mount --bind "/lower$path" "/host$path"
    fi
done </needed
/bin/busybox cp /guest.sh /host/tmp/guest.sh
# In place of this process: the kernel's own helpers (modprobe) take their root from process 1.
exec /bin/busybox chroot /host /bin/bash /tmp/guest.sh </dev/null
