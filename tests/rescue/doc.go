// Package rescue tests `directvol rescue` on volumes after a real power cut, which the guest's
// kernel refuses to mount. The newer kernel of the rescue VM recovers a volume that has grown once.
// It refuses a volume that has grown several times, or whose directory leads beyond its end, until
// rescue has written the later size into the superblock. The tests of the first kind are in `make
// test`, the others in `make test-long`.
package rescue
