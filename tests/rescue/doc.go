// Package rescue holds the test of directvol rescue on a volume that a real power
// cut has left: one that the guest's kernel refuses, and the newer one of the
// rescue VM recovers. There is nothing in it but tests.
package rescue
