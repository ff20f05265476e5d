package experiments

import (
	"maps"
	"regexp"
	"slices"
	"testing"
)

func TestABaselineIsMeasuredWithTheRowThatWasAskedFor(t *testing.T) {
	for pattern, want := range map[string][]string{
		"^health_check_rtt$": {"health_check_rtt", "vsock_echo_rtt"},
		"^resize_xfs$":       {"resize_xfs", "vsock_echo_rtt"},
		"^vsock_echo_rtt$":   {"vsock_echo_rtt"}, // of one experiment, not of all experiments with that row
		"boot_to_ready":      {"boot_to_mount_by_hand", "boot_to_ready"},
		"nothing is":         nil,
	} {
		got := map[string]bool{}
		some := chosen(regexp.MustCompile(pattern).MatchString)
		for _, e := range some {
			for _, l := range e.lines {
				got[l.Name] = true
			}
		}
		if rows := slices.Sorted(maps.Keys(got)); !slices.Equal(rows, want) || len(some) > 1 {
			t.Errorf("%s\nwant %v of one experiment\ngot  %v of %d", pattern, want, rows, len(some))
		}
	}
	if some := chosen(func(string) bool { return true }); len(some) != len(all) {
		t.Errorf("every row\nwant %d experiments\ngot  %d", len(all), len(some))
	}
}

// issueRows are the rows whose figures are compared from one change to the next.
var issueRows = []string{
	"vsock_8_streams", "vsock_echo_rtt", "health_check_rtt", "volume_stats_rtt", "kata_health_check_rtt", "kata_volume_stats_rtt", "agent_syscalls_per_call",
	"resize_ext4", "resize_xfs", "block_resize_to_answer", "attach_to_mounted", "boot_to_mount", "agent_binary_bytes", "agent_rss_anon_bytes",
	"fio_randread", "fio_randwrite", "fio_fsync", "fio_requests", "probe_cost", "boot_to_ready",
	"volume_stats_rtt_256", "mount_256", "grow_ext4_1tib", "grow_xfs_1tib", "grow_btrfs_1tib", "idle_wakeups",
}

func TestEveryRowHasItsBaselineBesideItAndAName(t *testing.T) {
	seen := map[string]bool{}
	for _, e := range all {
		names := map[string]bool{}
		for _, l := range e.lines {
			if names[l.Name] {
				t.Errorf("%s: two rows are called %s", e.name, l.Name)
			}
			names[l.Name], seen[l.Name] = true, true
			if l.Name == "" || l.Unit == "" || l.What == "" {
				t.Errorf("%s: a row lacks its name, unit or words: %+v", e.name, l)
			}
		}
		for _, l := range e.lines {
			if l.Baseline != "" && !names[l.Baseline] {
				t.Errorf("%s: %s is divided by %q, which is not measured with it", e.name, l.Name, l.Baseline)
			}
			if r := l.Goal.Rival(); r != "" && !seen[r] {
				t.Errorf("%s: %s is to be compared with %q, which is not measured before it", e.name, l.Name, r)
			}
		}
	}
	for _, name := range issueRows {
		if !seen[name] {
			t.Errorf("no row is called %s", name)
		}
	}
}
