// Package rescue holds the tests of directvol rescue on volumes that a real power
// cut has left: one that the guest's kernel refuses, and the newer one of the
// rescue VM recovers, and one that both refuse until its superblock is told. There is nothing in it but tests.
package rescue
