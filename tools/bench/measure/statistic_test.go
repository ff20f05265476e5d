package measure

import "testing"

func TestQuantileIsTheNearestRank(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(100 - i)
	}
	for _, c := range []struct {
		samples []float64
		q, want float64
	}{
		{hundred, 0.99, 99}, {hundred, 0.5, 50}, {hundred, 0, 1}, {hundred, 1, 100},
		{[]float64{7}, 0.99, 7}, {[]float64{3, 1, 2}, 0.99, 3}, {nil, 0.99, 0},
	} {
		if got := Quantile(c.samples, c.q); got != c.want {
			t.Errorf("quantile %v of %d samples\nwant %v\ngot  %v", c.q, len(c.samples), c.want, got)
		}
	}
}

func TestMedianIsTheMiddle(t *testing.T) {
	for _, c := range []struct {
		samples []float64
		want    float64
	}{{[]float64{3, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5}, {[]float64{-5}, -5}, {nil, 0}} {
		if got := Median(c.samples); got != c.want {
			t.Errorf("median of %v\nwant %v\ngot  %v", c.samples, c.want, got)
		}
	}
}

func TestSamplesStayInTheirOrder(t *testing.T) {
	samples := []float64{3, 1, 2}
	Median(samples)
	Quantile(samples, 0.5)
	if samples[0] != 3 || samples[2] != 2 {
		t.Errorf("want 3 1 2\ngot  %v", samples)
	}
}
