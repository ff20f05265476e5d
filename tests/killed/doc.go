// Package killed holds the kill campaign: while volumes grow under their writers in a
// guest, and another one comes and goes, one part of what serves them is killed with
// SIGKILL. TestKillOfEachPartLosesNothing is its short form, in `make test`; `make test-long` runs
// TestCampaignOfKillsLosesNothing and writes what came of it to build/killed.md.
//
// The parts, and what happens to the volumes:
//
//	agent  the guest's agent, a service there: its init starts another one, and the
//	       same VM goes on
//	vsock  the backend of the guest's vsock: nobody reaches the guest any more; the
//	       sandbox is stopped, killed where that fails, and started again
//	qemu   a power cut
//	host   the process that has the sandbox: QEMU and the backend end with it, and
//	       their sockets stay; another process starts the sandbox again
//
// The host's side of a guest runs in a process of its own, this test's program once
// more (host.go), which carries out the calls that it reads from its standard input
// and answers on its standard output. So the test knows what was promised, whoever is
// killed: which calls had begun, and which of them had ended. The writers' blocks are
// acknowledged to the test itself, over the guest's vsock.
//
// After a kill the calls that were cut off are made again and have to finish; the agent
// may be killed once more in each of them, and the host's process while it starts the
// guest again. Then
// every acknowledged block is read, each volume is grown once more, unmounted and
// detached, and its fsck has to be silent. A volume of the class that `directvol
// rescue` is made for (package tests/cuts) is rescued first, and counted. Nothing may
// be left: in the guest no mount, in QEMU no PCI slot and no block node, on the host
// no process, no lock on an image and no file in the VM's directory.
//
// A round is chosen by its seed: the volumes, the part, and the call during which it is
// killed. The moment is not: it depends on the machine. Settings of a run by hand, in
// the environment:
//
//	KILLED_SEED    the first round's seed; the next ones' follow it
//	KILLED_COUNT   how many rounds
//	KILLED_TARGET  agent, vsock, qemu or host: that part in every round
//
// A round that fails leaves its images, the guest's console and the host's log in
// build/killed, and its failure says how to run it again, for example:
//
//	KILLED_SEED=4711 KILLED_COUNT=1 go test -v -run KillOfEachPart ./tests/killed
package killed
