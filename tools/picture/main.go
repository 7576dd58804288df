// Command picture draws docs/minibatch.svg: the way of one mini-batch above, the overlap of three
// below.
package main

//go:generate go run . -o ../../docs/minibatch.svg

import (
	"flag"
	"fmt"
	"log"
	"os"
	"strings"
)

const (
	blue   = "#dbe9f9"
	green  = "#ddf2dd"
	orange = "#fbe6d0"
	gray   = "#eeeeee"
	ink    = "#222222"
)

// canvas collects SVG elements.
type canvas struct{ strings.Builder }

func (c *canvas) box(x, y, w, h int, fill, title, below string) {
	fmt.Fprintf(c, `<rect x="%d" y="%d" width="%d" height="%d" rx="5" fill="%s" stroke="%s"/>`+"\n",
		x, y, w, h, fill, ink)
	line := y + h/2 + 5
	if below != "" {
		line -= 8
		c.text(x+w/2, line+16, 11, "middle", below)
	}
	c.text(x+w/2, line, 14, "middle", title)
}

func (c *canvas) bar(x, y, w int, fill, title string) {
	fmt.Fprintf(c, `<rect x="%d" y="%d" width="%d" height="15" rx="3" fill="%s" stroke="%s"/>`+"\n",
		x, y, w, fill, ink)
	c.text(x+w/2, y+11, 10, "middle", title)
}

func (c *canvas) text(x, y, size int, anchor, s string) {
	fmt.Fprintf(c, `<text x="%d" y="%d" font-size="%d" text-anchor="%s" fill="%s">%s</text>`+"\n",
		x, y, size, anchor, ink, s)
}

// arrow goes along points; the last segment has the head.
func (c *canvas) arrow(points ...int) {
	var p []string
	for i := 0; i < len(points); i += 2 {
		p = append(p, fmt.Sprintf("%d,%d", points[i], points[i+1]))
	}
	fmt.Fprintf(c, `<polyline points="%s" fill="none" stroke="%s" marker-end="url(#head)"/>`+"\n",
		strings.Join(p, " "), ink)
}

func draw() string {
	var c canvas
	c.WriteString(
		`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 410" font-family="sans-serif">
<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs>
<rect width="860" height="410" fill="white"/>
`)
	c.box(10, 85, 110, 50, blue, "sample", "neighbours, by hop")
	c.box(160, 85, 110, 50, blue, "look up", "where is each row?")
	c.box(340, 20, 150, 45, green, "GPU cache", "hottest rows")
	c.box(340, 87, 150, 45, green, "CPU cache", "next hottest rows")
	c.box(340, 154, 150, 45, orange, "SSDs", "all rows, striped")
	c.box(580, 85, 120, 50, gray, "feature tensor", "a row for each node")
	c.box(740, 85, 110, 50, blue, "train", "forward, backward")
	c.arrow(120, 110, 160, 110)
	c.arrow(270, 110, 300, 110, 300, 42, 340, 42)
	c.arrow(270, 110, 340, 110)
	c.arrow(270, 110, 300, 110, 300, 176, 340, 176)
	c.arrow(490, 42, 540, 42, 540, 100, 580, 100)
	c.arrow(490, 110, 580, 110)
	c.arrow(490, 176, 540, 176, 540, 120, 580, 120)
	c.arrow(700, 110, 740, 110)
	c.text(415, 12, 11, "middle", "gather: copy what is cached")
	c.text(415, 216, 11, "middle", "submit and complete: the device fills the SSDs’ queues itself")

	// Three mini-batches one below the other; time runs to the right.
	c.text(10, 262, 12, "start",
		"Time →  three mini-batches, pipeline deep: reads of one hop go out while the next is sampled")
	for batch := range 3 {
		x, y := 110+batch*165, 280+batch*42
		c.text(10, y+20, 12, "start", fmt.Sprintf("mini-batch %d", batch+1))
		c.bar(x, y, 80, blue, "sample hop 1")
		c.bar(x+82, y, 80, blue, "sample hop 2")
		c.bar(x+82, y+17, 160, orange, "reads in flight")
		c.bar(x+244, y+8, 110, green, "train")
	}
	c.WriteString("</svg>\n")
	return c.String()
}

func main() {
	out := flag.String("o", "docs/minibatch.svg", "`FILE` to write")
	flag.Parse()
	if err := os.WriteFile(*out, []byte(draw()), 0o644); err != nil {
		log.Fatal(err)
	}
}
