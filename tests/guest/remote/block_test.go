package remote

import (
	"bytes"
	"testing"
)

func TestBlocksAreReproducibleAndAllDifferent(t *testing.T) {
	const blocks = 64
	seen := map[string]bool{}
	sums := map[uint64]bool{}
	for seed := range uint64(4) {
		for index := range uint64(blocks) {
			first, second := make([]byte, 512), make([]byte, 512)
			Fill(first, seed, index)
			Fill(second, seed, index)
			if !bytes.Equal(first, second) {
				t.Fatalf("seed %d, block %d: two fillings differ", seed, index)
			}
			seen[string(first)] = true
			sums[Sum(index, first)] = true
		}
	}
	if want := 4 * blocks; len(seen) != want || len(sums) != want {
		t.Errorf("different blocks and sums\nwant: %d and %d\n got: %d and %d", want, want, len(seen), len(sums))
	}
}

func TestSumSeesEveryBitTheIndexAndTheLength(t *testing.T) {
	block := make([]byte, 515) // with a tail shorter than a word
	Fill(block[:512], 1, 1)
	want := Sum(1, block)
	for bit := range len(block) * 8 {
		block[bit/8] ^= 1 << (bit % 8)
		if Sum(1, block) == want {
			t.Errorf("bit %d flipped: the same sum", bit)
		}
		block[bit/8] ^= 1 << (bit % 8)
	}
	if Sum(2, block) == want {
		t.Error("another index: the same sum")
	}
	for length := range block {
		if Sum(1, block[:length]) == want {
			t.Errorf("cut to %d bytes: the same sum", length)
		}
	}
	if zero := make([]byte, 16); Sum(0, zero) == Sum(0, zero[:8]) {
		t.Error("8 and 16 zero bytes: the same sum")
	}
}

func BenchmarkFillAndSum(b *testing.B) {
	block := make([]byte, DefaultBlock)
	b.SetBytes(DefaultBlock)
	for b.Loop() {
		Fill(block, 1, 1)
		Sum(1, block)
	}
}
