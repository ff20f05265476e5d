// Package churn is the model test of host/sandbox with a real QEMU, kernel and agent. It attaches,
// mounts, grows, measures and detaches many volumes of one guest concurrently and at random, like
// impatient callers, and checks that every promise of a call is kept.
package churn
