// Package poweroff tests a guest whose PID 1, the agent, receives a signal to end: the agent
// unmounts all volumes, also under writers and on slow disks, and powers off. The package contains
// only tests.
package poweroff
