// Package vm is the harness of every test that needs a VM, and of the demo: it
// boots a guest from what make has built, gives it scratch disks, puts real
// faults under them, and checks on the host what is left. When something fails
// it tells what the guest's console said last and how to boot the same again.
package vm
