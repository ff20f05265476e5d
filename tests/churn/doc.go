// Package churn attaches, mounts, grows, measures and takes away many volumes of one guest
// at once and at random, as impatient callers do, and looks whether what they were promised
// is so: the model test of host/sandbox, with a real QEMU, kernel and agent.
package churn
