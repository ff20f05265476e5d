package report

import (
	"bytes"
	"errors"
	"fmt"
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/directvol/directvol/protocols/output"
	"github.com/directvol/directvol/tools/bench/measure"
)

// chart is a bar chart of some rows: a group of bars for each name, and in each group one bar per
// series.
type chart struct {
	file, title, axis string
	names             []string
	series            []series
	stacked           bool    // the bars of a group are stacked
	floor             float64 // the height of a horizontal line; 0 draws none
	floorName         string
}

// series is a set of bars of one colour: one row for each of the chart's names.
type series struct {
	name   string
	rows   []string
	colour color.Color
}

// Colours that colour-blind people can distinguish (Okabe and Ito).
var (
	blue   = color.RGBA{0x00, 0x72, 0xb2, 0xff}
	orange = color.RGBA{0xe6, 0x9f, 0x00, 0xff}
	green  = color.RGBA{0x00, 0x9e, 0x73, 0xff}
	grey   = color.RGBA{0x66, 0x66, 0x66, 0xff}
)

var charts = []chart{
	{
		file: "rtt", title: "One call, host to guest and back", axis: "times a bare echo",
		names: []string{"Check", "GetVolumeStats", "Check, in turn", "GetVolumeStats, in turn"},
		series: []series{
			{"directvol-agent", []string{"health_check_rtt_apart", "volume_stats_rtt_apart", "health_check_rtt", "volume_stats_rtt"}, blue},
			{"kata-agent", []string{"kata_health_check_rtt_apart", "kata_volume_stats_rtt_apart", "kata_health_check_rtt", "kata_volume_stats_rtt"}, orange},
		},
		floor: 1, floorName: "the echo",
	},
	{
		file: "memory", title: "Memory of an agent in an initramfs guest", axis: "MB",
		names: []string{"directvol-agent", "kata-agent"},
		series: []series{
			{"program", []string{"agent_binary_bytes", "kata_binary_bytes"}, blue},
			{"anonymous memory after 10,000 calls", []string{"agent_rss_anon_bytes", "kata_rss_anon_bytes"}, orange},
		},
		stacked: true,
	},
	{
		file: "fio", title: "4 KiB in a guest, one at a time", axis: "operations a second",
		names: []string{"random read", "random write", "random write, fsync each"},
		series: []series{
			{"mounted by the agent", []string{"fio_randread", "fio_randwrite", "fio_fsync"}, blue},
			{"the same device, by hand", []string{"fio_randread_by_hand", "fio_randwrite_by_hand", "fio_fsync_by_hand"}, green},
			{"virtio-fs", []string{"fio_randread_virtiofs", "fio_randwrite_virtiofs", "fio_fsync_virtiofs"}, orange},
		},
	},
}

// charts draws the charts whose first series was measured, into files whose names begin with stem,
// and returns the files' names.
func (r *Report) charts(stem string) (files []string, failed error) {
	for _, c := range charts {
		c.series = r.measured(c.series)
		if len(c.series) == 0 || !r.has(c.series[0].rows[0]) {
			continue
		}
		file := stem + "-" + c.file + ".svg"
		if err := c.draw(r, file); err != nil {
			failed = errors.Join(failed, fmt.Errorf("draw %s: %w", file, err))
			continue
		}
		files = append(files, file)
	}
	return files, failed
}

// measured returns the series that have a measured row.
func (r *Report) measured(all []series) (some []series) {
	for _, s := range all {
		for _, name := range s.rows {
			if r.has(name) {
				some = append(some, s)
				break
			}
		}
	}
	return some
}

func (r *Report) has(name string) bool { _, ok := r.row(name); return ok }

func (r *Report) row(name string) (measure.Row, bool) {
	for _, row := range r.Rows {
		if row.Name == name {
			return row, true
		}
	}
	return measure.Row{}, false
}

const (
	chartWidth, chartHeight = 18 * vg.Centimeter, 9 * vg.Centimeter
	barWidth                = 0.9 * vg.Centimeter
)

func (c chart) draw(r *Report, file string) error {
	plot.DefaultFont.Variant = "Sans"
	p := plot.New()
	p.Title.Text, p.Title.Padding, p.Y.Label.Text = c.title, 2*vg.Millimeter, c.axis
	p.Y.Min = 0
	// With the legend at the left, the text follows its colour, so that a font wider than expected
	// does not overlap anything.
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, true, vg.Millimeter
	var below *plotter.BarChart
	for i, s := range c.series {
		bars, values, err := c.bars(r, s, i)
		if err != nil {
			return err
		}
		if c.stacked && below != nil {
			bars.StackOn(below)
		}
		below = bars
		p.Add(bars)
		p.Legend.Add(s.name, bars)
		if !c.stacked {
			if err := c.addSpread(p, values, bars.Offset); err != nil {
				return err
			}
		}
	}
	if c.floor > 0 {
		line := plotter.NewFunction(func(float64) float64 { return c.floor })
		line.Color, line.Dashes = grey, []vg.Length{vg.Millimeter, vg.Millimeter}
		p.Add(line)
		p.Legend.Add(c.floorName, line)
	}
	p.NominalX(c.names...)
	p.X.Min, p.X.Max = -0.5, float64(len(c.names))-0.5
	p.Y.Max *= 1.35 // leaves room for the legend
	canvas := vgsvg.New(chartWidth, chartHeight)
	p.Draw(draw.New(canvas))
	return save(file, canvas)
}

// spread is a bar's height, and the distances to the lowest and the highest run.
type spread struct{ value, below, above float64 }

// bars returns the bars of one series. A row that was not measured has a bar of height 0.
func (c chart) bars(r *Report, s series, i int) (*plotter.BarChart, []spread, error) {
	values := make([]spread, len(s.rows))
	heights := make(plotter.Values, len(s.rows))
	for at, name := range s.rows {
		if row, ok := r.row(name); ok {
			values[at] = c.height(row)
			heights[at] = values[at].value
		}
	}
	bars, err := plotter.NewBarChart(heights, barWidth)
	if err != nil {
		return nil, nil, err
	}
	bars.Color, bars.LineStyle.Width = s.colour, 0
	if !c.stacked {
		bars.Offset = barWidth * vg.Length(float64(i)-float64(len(c.series)-1)/2)
	}
	return bars, values, nil
}

// height returns the height of a row's bar: the ratio if the chart has a floor, megabytes for a row
// in bytes, and otherwise the row's value.
func (c chart) height(row measure.Row) spread {
	switch {
	case c.floor > 0 && row.Comparison != nil:
		return spread{row.Ratio, row.Ratio - row.RatioMin, row.RatioMax - row.Ratio}
	case row.Unit == "bytes":
		return spread{value: row.Value / 1e6}
	default:
		least, largest := measure.Quantile(row.Runs, 0), measure.Quantile(row.Runs, 1)
		return spread{row.Value, max(row.Value-least, 0), max(largest-row.Value, 0)}
	}
}

// spreads are the values of error bars, for the plotter.
type spreads struct {
	plotter.XYs
	plotter.YErrors
}

func (c chart) addSpread(p *plot.Plot, values []spread, offset vg.Length) error {
	var s spreads
	for i, v := range values {
		s.XYs = append(s.XYs, plotter.XY{X: float64(i), Y: v.value})
		s.YErrors = append(s.YErrors, struct{ Low, High float64 }{v.below, v.above})
	}
	bars, err := plotter.NewYErrorBars(s)
	if err != nil {
		return err
	}
	p.Add(shifted{bars, offset})
	return nil
}

// shifted are error bars on bars that are not in the middle of their group.
type shifted struct {
	*plotter.YErrorBars
	by vg.Length
}

// Plot draws the error bars at the places of their bars.
func (s shifted) Plot(c draw.Canvas, p *plot.Plot) {
	c.Push()
	defer c.Pop()
	c.Translate(vg.Point{X: s.by})
	s.YErrorBars.Plot(c, p)
}

// save writes a canvas as SVG. A viewer without the SVG's fonts uses other fonts of the same
// widths, if it has them.
func save(file string, canvas *vgsvg.Canvas) error {
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return err
	}
	const font = "font-family:Liberation Sans"
	return output.WriteFile(file, bytes.ReplaceAll(b.Bytes(), []byte(font), []byte(font+",Arial,sans-serif")))
}
