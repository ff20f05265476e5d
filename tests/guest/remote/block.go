package remote

import (
	"encoding/binary"
	"math/bits"
)

// Odd constants with well mixed bits: the one from the golden ratio, and the two of SplitMix64
// (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
const (
	golden = 0x9e3779b97f4a7c15
	mixA   = 0xbf58476d1ce4e5b9
	mixB   = 0x94d049bb133111eb
)

// mix is SplitMix64's finalizer: a bijection in which each bit of x reaches each bit of the result.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * mixA
	x = (x ^ x>>27) * mixB
	return x ^ x>>31
}

// Fill fills block, whose length must be a multiple of 8, with the content of the block number
// index under seed: the words of a xorshift generator (Marsaglia, 2003) that starts at a mix of
// both numbers. Emulated machines are fast at three shifts per word, and no two blocks are alike.
func Fill(block []byte, seed, index uint64) {
	x := mix(mix(seed+golden) + index*golden)
	if x == 0 { // xorshift cannot leave the state 0
		x = golden
	}
	for ; len(block) >= 8; block = block[8:] {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(block, x)
	}
}

// Sum is a 64 bit checksum of a block, its index and its length. It makes a multiply and a rotate
// for each eight bytes. For a fixed state each step is a bijection of the word, and for a fixed
// word a bijection of the state. Blocks that differ in one word therefore never have equal sums,
// and other blocks only by chance.
//
// CRC-32C would be slow here: it depends on a special instruction, which QEMU emulates bit by bit,
// with 64 turns for eight bytes.
func Sum(index uint64, block []byte) uint64 {
	h := mix(index+golden) ^ uint64(len(block))*mixA
	for ; len(block) >= 8; block = block[8:] {
		h = bits.RotateLeft64((h^binary.LittleEndian.Uint64(block))*mixB, 29)
	}
	var tail [8]byte
	copy(tail[:], block)
	return mix(h ^ binary.LittleEndian.Uint64(tail[:]))
}
