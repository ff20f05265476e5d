// Package vm is the harness of every test that needs a VM, and of the demo. It boots a guest from
// the files that make has built, attaches scratch disks, puts real faults below them, and checks
// the results on the host. After a failure it prints the end of the guest's console and the command
// that boots the same guest again.
package vm
