//go:build long

package soak

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/directvol/directvol/protocols/service"
	"github.com/directvol/directvol/protocols/volumepb"
	"github.com/directvol/directvol/tests/guest/remote"
)

// The pauses between two calls of a kind, of one volume or, for leases and trims, of all of them.
// Without them, an hour would make images too large for a test's host.
const (
	askPause    = 500 * time.Millisecond
	growPause   = 10 * time.Second
	freezePause = 15 * time.Second
	trimPause   = 6 * time.Second
)

// every makes calls until ctx ends, with a pause before each.
func every(ctx context.Context, pause time.Duration, do func()) {
	ticks := time.NewTicker(pause)
	defer ticks.Stop()
	for {
		select {
		case <-ticks.C:
			do()
		case <-ctx.Done():
			return
		}
	}
}

// Options of fio, which makes two workloads of each volume: reads and writes past the page cache,
// several at a time, in a file that is removed again; and writes through it that are synced now and
// then, read again and compared. Their numbers are bound by time and size, so that they end.
var (
	direct = []string{
		"--name=direct", "--ioengine=libaio", "--iodepth=4", "--direct=1", "--rw=randrw", "--bs=4k", "--size=16M",
		"--time_based", "--runtime=20", "--unlink=1",
	}
	verified = []string{
		"--name=verified", "--ioengine=psync", "--rw=randwrite", "--bs=16k", "--size=4M", "--fsync=16",
		"--verify=crc32c", "--verify_fatal=1",
	}
)

// fioResult is the part of fio's JSON that is counted (its HOWTO, "JSON output").
type fioResult struct {
	Jobs []struct {
		Error       int `json:"error"`
		Read, Write struct {
			Bytes   uint64 `json:"io_bytes"`
			Latency struct {
				Max uint64 `json:"max"`
			} `json:"lat_ns"`
		}
	} `json:"jobs"`
}

// runFio runs a workload of a volume to its end.
func (s *soak) runFio(ctx context.Context, v *volume, workload []string) (fioResult, error) {
	var result fioResult
	name := strings.TrimPrefix(workload[0], "--name=")
	argv := append(slices.Clone(s.fio), "--thread", "--output-format=json", "--percentile_list=50")
	argv = append(argv, workload...)
	exit, err := s.guest.Remote.Exec(ctx, remote.Command{Argv: append(argv, "--filename="+v.GuestPath+"/fio-"+name)})
	if err != nil {
		return result, err
	}
	err = json.Unmarshal(exit.Stdout, &result)
	if err != nil || exit.Code != 0 || len(result.Jobs) != 1 || result.Jobs[0].Error != 0 {
		return result, fmt.Errorf("fio exits %d %s, error %v:\n%s%s", exit.Code, exit.Signal, err, exit.Stderr, exit.Stdout)
	}
	return result, nil
}

func (s *soak) fioOnce(v *volume, workload []string) error {
	name := "fio, " + strings.TrimPrefix(workload[0], "--name=")
	return s.call(name, v.name, func(ctx context.Context) error {
		result, err := s.runFio(ctx, v, workload)
		if err != nil {
			return err
		}
		job := result.Jobs[0]
		s.add(name+", bytes read", job.Read.Bytes)
		s.add(name+", bytes written", job.Write.Bytes)
		s.mu.Lock()
		defer s.mu.Unlock()
		const request = "milliseconds of fio's longest request"
		s.counts[request] = max(s.counts[request], max(job.Read.Latency.Max, job.Write.Latency.Max)/uint64(time.Millisecond))
		return nil
	})
}

func (s *soak) load(ctx context.Context, v *volume) {
	for ctx.Err() == nil {
		if s.fioOnce(v, direct) != nil {
			return // the fault is recorded
		}
	}
}

func (s *soak) verify(ctx context.Context, v *volume) {
	for ctx.Err() == nil {
		if s.fioOnce(v, verified) != nil {
			return
		}
		v.rounds++
	}
}

// writtenFile is the file of the checksummed writer, which syncs each block.
const writtenFile = "written"

// write writes a file again and again, and reads it back each time.
func (s *soak) write(ctx context.Context, v *volume) {
	for seed := uint64(1); ctx.Err() == nil; seed++ {
		err := s.call("file of the synced writer", v.name, func(ctx context.Context) error {
			path := v.GuestPath + "/" + writtenFile
			writer, err := s.guest.Remote.StartWriter(ctx, remote.WriteBlocks{Path: path, BlockBytes: 64 << 10, Seed: seed, LimitBytes: 4 * miB})
			if err != nil {
				return err
			}
			if err := writer.Err(); err != nil {
				return err
			}
			v.ledger = writer.Ledger()
			s.add("synced bytes", v.ledger.Bytes())
			s.mu.Lock()
			s.longest["file of the synced writer: a block"] = max(s.longest["file of the synced writer: a block"], slices.Max(v.ledger.Took()))
			s.mu.Unlock()
			s.add("file of the synced writer: a block", v.ledger.Blocks())
			found, err := s.guest.Remote.Verify(ctx, path, v.ledger, nil)
			return errors.Join(err, found.Err())
		})
		if err != nil {
			return
		}
	}
}

// grow grows a volume, mostly within one of the agent's steps, and sometimes in two of them.
func (s *soak) grow(ctx context.Context, v *volume) {
	every(ctx, growPause, func() {
		if v.goal == v.size {
			v.goal += uint64(rand.IntN(4)+1) * 64 * miB
			if v.growths%64 == 10 {
				v.goal += 17 * giB
			}
		}
		err := s.call("growth", v.name, func(ctx context.Context) error {
			if !v.mapped {
				return v.Resize(ctx, v.goal)
			}
			if err := s.guest.VM().ResizeDisk(ctx, v.DiskID(), v.goal); err != nil {
				return err
			}
			return s.client.GrowVolume(ctx, v.GuestPath, v.goal, nil)
		})
		if err == nil {
			s.add("bytes of growth", v.goal-v.size)
			v.growths++
			v.size = v.goal
		}
	})
}

// ask asks for statistics and conditions.
func (s *soak) ask(ctx context.Context, v *volume) {
	var least uint64
	every(ctx, askPause, func() {
		_ = s.call("statistics", v.name, func(ctx context.Context) error {
			stats, err := s.client.GetVolumeStats(ctx, v.GuestPath)
			if err != nil {
				return err
			}
			if c := stats.VolumeCondition; c.Abnormal {
				s.condition("statistics", v.GuestPath, []*volumepb.Condition{{Message: c.Message}})
			}
			total := stats.Usage[0].Total
			// A growth adds the size of an ext4 before the tables of its new groups are taken off.
			if total+total/32 < least {
				return fmt.Errorf("a total of %d bytes, after %d", total, least)
			}
			least = max(least, total)
			conditions, err := s.client.GetVolumeHealth(ctx, v.GuestPath)
			s.condition("GetVolumeHealth", v.GuestPath, conditions)
			return err
		})
	})
}

// trim trims one volume after the other.
func (s *soak) trim(ctx context.Context) {
	next := 0
	every(ctx, trimPause, func() {
		v := s.volumes[next%len(s.volumes)]
		next++
		_ = s.call("trim", v.name, func(ctx context.Context) error {
			request := &volumepb.TrimVolumeRequest{VolumeGuestPath: v.GuestPath}
			answer, err := service.Call[volumepb.TrimVolumeResponse](ctx, s.plain, volumepb.VolumeServiceName, "TrimVolume", request)
			if err == nil {
				s.add("trimmed bytes", answer.TrimmedBytes)
				s.add("trims that freed something: "+v.name, min(answer.TrimmedBytes, 1))
			}
			return err
		})
	})
}

// thaw is a way in which a lease ends.
type thaw int

const (
	byCall thaw = iota
	byHangUp
	byItsTime
	ways
)

func (w thaw) String() string {
	return [...]string{"by ThawVolumes", "by a hang-up", "by the lease's end"}[w]
}

// freeze freezes one volume or several for up to two seconds.
func (s *soak) freeze(ctx context.Context) {
	leases := 0
	every(ctx, freezePause, func() {
		way := thaw(leases % int(ways))
		leases++
		chosen := slices.Clone(s.volumes)
		rand.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
		chosen = chosen[:1+rand.IntN(len(chosen))]
		var names, paths []string
		for _, v := range chosen {
			names, paths = append(names, v.name), append(paths, v.GuestPath)
		}
		held := time.Duration(200+rand.IntN(2000)) * time.Millisecond
		err := s.call("freeze, thawed "+way.String(), strings.Join(names, ", "), func(ctx context.Context) error { return s.lease(ctx, paths, way, held) })
		if err == nil {
			s.add("frozen volumes", uint64(len(chosen)))
		}
	})
}

// lease freezes volumes, holds them frozen for some time, and thaws them.
func (s *soak) lease(ctx context.Context, paths []string, way thaw, held time.Duration) error {
	client, err := s.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	length := 5 * time.Minute
	if way == byItsTime {
		length = held
	}
	request := &volumepb.FreezeVolumesRequest{VolumeGuestPaths: paths, LeaseMilliseconds: uint32(length.Milliseconds())}
	frozen := false
	for lease, err := range service.Receive[volumepb.FreezeVolumesResponse](ctx, client, volumepb.VolumeServiceName, "FreezeVolumes", request) {
		if err != nil {
			if frozen && way == byItsTime && status.Code(err) == codes.Aborted {
				return nil
			}
			return fmt.Errorf("frozen: %v: %w", frozen, err)
		}
		frozen = true
		for _, v := range lease.Volumes {
			if v.Consistency != volumepb.FrozenVolume_FROZEN {
				return fmt.Errorf("want frozen volumes, got %v", lease)
			}
		}
		if way == byItsTime {
			continue
		}
		<-time.After(held)
		if way == byHangUp {
			return nil
		}
		if _, err := service.Call[emptypb.Empty](ctx, client, volumepb.VolumeServiceName, "ThawVolumes", &volumepb.ThawVolumesRequest{Lease: lease.Lease}); err != nil {
			return err
		}
	}
	if !frozen {
		return io.ErrUnexpectedEOF
	}
	return nil
}
