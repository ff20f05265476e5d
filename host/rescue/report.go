package rescue

import (
	"errors"
	"time"

	"github.com/directvol/directvol/host/fsck"
	"github.com/directvol/directvol/host/holders"
)

// Step is one step of a rescue.
type Step struct {
	Name string
	// Done is false before the step and true after it. Detail, Err and Took are set after it.
	Done   bool
	Detail string
	Err    error
	Took   time.Duration
}

// Report is the outcome of a rescue. directvol rescue --json prints it as JSON.
type Report struct {
	Disk   string `json:"disk"`
	FSType string `json:"fstype"` // "" if it was not identified
	Kernel string `json:"kernel"` // the release of the VM's kernel
	// Mounted is true if the disk was mounted and unmounted again.
	Mounted bool `json:"mounted"`
	// Recovered says whether the mount recovered a log: yes, no or unknown.
	Recovered string `json:"recovered"`
	// Attempts is how often a VM's kernel was asked to mount the disk.
	Attempts int `json:"attempts"`
	// Superblock describes what was written into the primary superblock of an xfs; nil if that was
	// not needed or no growth was proven.
	Superblock *Correction `json:"superblock,omitempty"`
	// Replay is the run of e2fsck -p to replay the journal of an ext4; nil if that was not needed.
	// Its output lists the changes to the disk.
	Replay *fsck.Run `json:"replay,omitempty"`
	// KernelLog contains the messages of the VMs' kernels about the filesystem.
	KernelLog []string `json:"kernel_log"`
	// Fsck is the check afterwards; nil if it was not run.
	Fsck *fsck.Run `json:"fsck"`
	// Unseen is the number of processes on this host that could not be examined, so that they may
	// use the disk.
	Unseen int `json:"unseen_processes"`
	// Holders are the users of the disk. The rescue was refused because of them.
	Holders []holders.Holder `json:"holders,omitempty"`
	// Error is the reason of a failure; "" after success.
	Error string `json:"error,omitempty"`
}

// The values of Report.Recovered.
const (
	RecoveredYes     = "yes"
	RecoveredNo      = "no"
	RecoveredUnknown = "unknown"
)

// NewReport returns the report about a disk to which nothing has been done.
func NewReport(disk string) Report {
	return Report{Disk: disk, Recovered: RecoveredUnknown, KernelLog: []string{}}
}

// Failed returns the report with the reason of the failure.
func (r Report) Failed(err error) Report {
	r.Error = err.Error()
	if inUse, ok := errors.AsType[*holders.InUseError](err); ok {
		r.Holders = inUse.Holders
	}
	return r
}
