// Package poweroff holds the tests of a guest whose PID 1, the agent, is told to end by a
// signal: it unmounts all volumes, also under writers and on slow disks, and powers off.
// There is nothing in it but tests.
package poweroff
