package experiments

import (
	"context"
	"os"

	"github.com/directvol/directvol/host/agentclient"
	"github.com/directvol/directvol/protocols/address"
	"github.com/directvol/directvol/tools/bench/measure"
)

// kataVariable is the environment variable that names the real kata-agent.
const kataVariable = "KATA_AGENT"

var kataRoundTrips = experiment{
	name:  "kata-agent's round trips, in turn with the echo",
	lines: inTurnLines(kataPrefix, goals{measure.Behind("health_check_rtt"), measure.Behind("volume_stats_rtt"), measure.Behind("health_check_rtt_p99"), measure.Behind("volume_stats_rtt_p99")}),
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		return l.openKataRoundTrips(ctx, measureInTurn)
	},
}

var kataRoundTripsApart = experiment{
	name:  "kata-agent's round trips, each after the last has gone quiet",
	lines: apartLines(kataPrefix, measure.Behind("health_check_rtt_apart"), measure.Behind("volume_stats_rtt_apart")),
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		return l.openKataRoundTrips(ctx, measureApart)
	},
}

// kataPrefix begins the names of kata-agent's rows.
const kataPrefix = "kata_"

func (l *Setup) openKataRoundTrips(ctx context.Context, by roundTripMeasure) (measure.Session, error) {
	kata, err := l.theKata(ctx)
	if err != nil {
		return measure.Session{}, err
	}
	return l.openRoundTrips(ctx, l.guest, kata.address, kataPrefix, by)
}

var kataMemory = experiment{
	name: "the guest memory that kata-agent uses",
	lines: []measure.Line{
		{Name: "kata_binary_bytes", Unit: "bytes", Goal: measure.Behind("agent_binary_bytes"), What: "kata-agent's program, without its shared libraries"},
		{Name: "kata_rss_anon_bytes", Unit: "bytes", What: "its RssAnon after 10,000 calls"},
		{Name: "kata_memory_bytes", Unit: "bytes", Goal: measure.Behind("agent_memory_bytes"), What: "the two together: their cost in a guest whose root is an initramfs"},
	},
	open: func(ctx context.Context, l *Setup, _ int) (measure.Session, error) {
		kata, err := l.theKata(ctx)
		if err != nil {
			return measure.Session{}, err
		}
		pid, err := findProcess(ctx, l.guest, "kata-agent")
		if err != nil {
			return measure.Session{}, err
		}
		return l.openMemory(ctx, l.guest, server{kataPrefix, kata.program, kata.address, pid})
	},
}

// kata is a kata-agent that runs in the guest.
type kata struct {
	program string // on the host
	address address.Address
}

// theKata returns the guest's kata-agent. The first experiment that needs kata-agent starts it;
// from then on our agent has no work.
func (l *Setup) theKata(ctx context.Context) (kata, error) {
	k := kata{program: os.Getenv(kataVariable)}
	if k.program == "" {
		return k, measure.Unavailable("%s names no kata-agent: build one for Debian 12 (Kata Containers, src/agent: make), or take it from the rootfs image of a release, and set %s to its path", kataVariable, kataVariable)
	}
	guest, err := l.theGuest(ctx)
	if err != nil {
		return k, err
	}
	if l.kata == "" {
		// kata-agent runs as long as its context: the bench's, because ctx ends when the experiment
		// is set up.
		if l.kata, err = guest.StartKata(l.whole, k.program); err != nil {
			return k, err
		}
	}
	if k.address, err = address.Parse(l.kata); err != nil {
		return k, err
	}
	l.machine.KataAgent, err = versionOf(ctx, k.address)
	return k, err
}

// versionOf asks an agent for its version.
func versionOf(ctx context.Context, to address.Address) (string, error) {
	client, err := agentclient.Dial(ctx, to, agentclient.Config{})
	if err != nil {
		return "", err
	}
	defer client.Close()
	version, err := client.Version(ctx)
	if err != nil {
		return "", err
	}
	return version.AgentVersion, nil
}
