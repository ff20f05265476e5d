package remote

import "testing"

func TestLedgerTakesOnlyTheNextWholeBlock(t *testing.T) {
	ledger := NewLedger(512)
	for _, step := range []struct {
		block Block
		ok    bool
	}{
		{Block{Index: 1, Bytes: 512}, false}, // a block is left out
		{Block{Index: 0, Bytes: 511}, false},
		{Block{Index: 0, Bytes: 512}, true},
		{Block{Index: 0, Bytes: 512}, false}, // the same block again
		{Block{Index: 1, Bytes: 512}, true},
	} {
		if err := ledger.Record(step.block); (err == nil) != step.ok {
			t.Errorf("record %+v\nwant taken: %v\n got error: %v", step.block, step.ok, err)
		}
	}
	if got := ledger.Bytes(); got != 1024 {
		t.Errorf("bytes acknowledged\nwant: 1024\n got: %d", got)
	}
}

func TestComparisonNamesWhatIsWrong(t *testing.T) {
	if err := (Comparison{Blocks: 3, Bytes: 3}).Err(); err != nil {
		t.Errorf("all equal\nwant: no error\n got: %v", err)
	}
	err := Comparison{Blocks: 20, Differ: []uint64{4}, Missing: []uint64{11, 12, 13, 14, 15, 16, 17, 18, 19}}.Err()
	want := "of 20 acknowledged blocks 1 differ ([4]) and 9 are missing ([11 12 13 14 15 16 17 18] …)"
	if err == nil || err.Error() != want {
		t.Errorf("error\nwant: %s\n got: %v", want, err)
	}
}
