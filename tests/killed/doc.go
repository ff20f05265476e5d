// Package killed holds the kill campaign: while volumes of a guest grow under their writers, and
// another volume is attached and detached again and again, one of the parts that serve them is
// killed with SIGKILL. TestKillOfEachPartLosesNothing is the short form, in `make test`. `make
// test-long` runs TestCampaignOfKillsLosesNothing, which writes its results to build/killed.md.
//
// The parts, and the effect on the volumes:
//
//	agent  the guest's agent, as a service: its init starts another one, and the same VM
//	       continues
//	vsock  the backend of the guest's vsock: the guest cannot be reached any more; the
//	       sandbox is stopped, killed if that fails, and started again
//	qemu   a power cut
//	host   the process that has the sandbox: QEMU and the backend end with it, and their
//	       sockets stay; another process starts the sandbox again
//
// The host's side of a guest runs in a separate process, a second instance of this test's program
// (host.go). It reads calls from its standard input, carries them out, and answers on its standard
// output. Therefore the test always knows which calls had begun and which had ended, whichever part
// is killed. The writers' blocks are acknowledged to the test itself, over the guest's vsock.
//
// After a kill, the interrupted calls are made again and must finish. During each of these calls
// the agent may be killed once more, and the host's process may be killed while it starts the guest
// again. Then every acknowledged block is read, each volume is grown once more, unmounted and
// detached, and its fsck must be silent. A volume that needs `directvol rescue` (package
// tests/cuts) is rescued first, and counted. Nothing may remain: in the guest no mount, in QEMU no
// PCI slot and no block node, on the host no process, no lock on an image and no file in the VM's
// directory.
//
// The seed of a round chooses the volumes, the part, and the call during which the part is killed.
// It does not choose the exact moment, which depends on the machine. Settings of a manual run, in
// the environment:
//
//	KILLED_SEED    the first round's seed; the seeds of the next rounds follow from it
//	KILLED_COUNT   number of rounds
//	KILLED_FORMATS the volumes' formats: usual (the default; ext4 and xfs), or others (ext3
//	               and btrfs)
//	KILLED_TARGET  agent, vsock, qemu or host: kill this part in every round
//
// A failed round leaves its images, the guest's console and the host's log in build/killed, and its
// failure says how to run it again, for example:
//
//	KILLED_SEED=4711 KILLED_COUNT=1 go test -v -run KillOfEachPart ./tests/killed
package killed
