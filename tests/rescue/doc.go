// Package rescue holds the tests of directvol rescue on volumes that a real power
// cut has left. The guest's kernel refuses to mount them. The newer kernel of the
// rescue VM recovers a volume that has grown once; it refuses one that has grown
// several times, or whose directory leads beyond its end, until rescue has written
// the later size into the superblock. The first kind is in `make test`, the others
// are in `make test-long`.
package rescue
