package measure

import "testing"

func TestNumbersAreShortAndGrouped(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 1: "1", 1.3: "1.30", 0.99: "0.99", 12.34: "12.3", 412.7: "413", 1234.5: "1,234", 7_000_000: "7,000,000", -1242.4: "−1,242", -0.5: "−0.50",
	} {
		if got := Number(v); got != want {
			t.Errorf("%v\nwant %s\ngot  %s", v, want, got)
		}
	}
}
