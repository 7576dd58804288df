// Draws the figures of the page with Observable Plot. The page works without it: each figure has a
// table of its values. The root element says in data-state "ready" or "failed" how it went.
"use strict";
(() => {
	const root = document.documentElement;
	const failures = [];
	window.addEventListener("error", (e) => failures.push(e.message));
	const narrow = 480;

	// Series differ by colour, dash and symbol: any one of them suffices.
	const dashes = [null, "6 3", "2 3", "8 3 2 3"];
	const limitDashes = ["1 4", "10 4", "10 4 1 4", "4 4"];
	const symbols = ["circle", "square", "triangle", "diamond", "cross", "star", "wye", "times"];
	const colour = (i) => `var(--c${(i % 8) + 1})`;

	function format(axis) {
		if (axis.share) {
			return (v) => `${+(100 * v).toFixed(1)} %`;
		}
		return (v) => (Math.abs(v) >= 1e6 || (v !== 0 && Math.abs(v) < 1e-3) ?
			v.toExponential(2) : String(Math.abs(v) >= 1e4 ? Math.round(v) : +v.toPrecision(4)));
	}

	// The marks of a series: a line through points, and symbols at some.
	function line(s, points, some, dim) {
		const stroke = s.limit ? "var(--limit)" : colour(s.hue);
		const marks = [];
		if (!s.marks) {
			marks.push(Plot.line(points, {...dim, stroke, strokeWidth: s.limit ? 2.5 : 2, clip: s.limit,
				strokeDasharray: (s.limit ? limitDashes : dashes)[s.dash % 4]}));
		}
		if (!s.limit) {
			marks.push(Plot.dot(some, {...dim, fill: stroke, r: s.marks ? 5 : 3.5,
				symbol: s.marks && s.dash === 2 ? "star" : symbols[s.hue % symbols.length]}));
		}
		return marks;
	}

	function legend(entries) {
		const list = document.createElement("ul");
		list.className = "legend";
		for (const e of entries) {
			const item = document.createElement("li");
			if (e.series) {
				item.append(Plot.plot({width: 30, height: 12, margin: 0, axis: null,
					x: {domain: [0, 30]}, y: {domain: [0, 12]},
					marks: line(e.series, [[0, 6], [30, 6]], [[15, 6]], {})}));
			} else {
				item.innerHTML = '<svg width="14" height="12">' +
					`<rect width="14" height="12" fill="${e.colour}"/></svg>`;
			}
			item.firstChild.setAttribute("aria-hidden", "true");
			item.append(e.name);
			list.append(item);
		}
		return list;
	}

	function lines(f, width) {
		const marks = [];
		const x = format(f.x), y = format(f.y);
		for (const s of f.series) {
			if (s.points.some((p) => p.lo !== p.hi) && !s.marks) {
				marks.push(Plot.areaY(s.points, {x: "x", y1: "lo", y2: "hi", fill: colour(s.hue),
					fillOpacity: 0.18}));
			}
			const step = Math.ceil(s.points.length / 20);
			marks.push(...line(s, s.points, s.points.filter((_, i) => i % step === 0), {x: "x", y: "y"}));
		}
		const entries = f.series.map((series) => ({name: series.name, series}));
		const all = f.series.flatMap((s) => s.points.map((p) => ({...p, name: s.name})));
		marks.push(Plot.tip(all, Plot.pointer({x: "x", y: "y", ariaHidden: true, title: (p) =>
			`${p.name}\n${f.x.label}: ${x(p.x)}\n${f.y.label}: ${y(p.y)}` +
			(p.lo !== p.hi ? `\n${y(p.lo)} to ${y(p.hi)}` : "")})));
		const xs = [...new Set(all.map((p) => p.x))].sort((a, b) => a - b);
		const few = width < narrow ? 5 : 12;
		// Limits beyond the results are cut off, so that they do not press these to the floor.
		const results = f.series.filter((s) => !s.limit).flatMap((s) => s.points.map((p) => p.hi));
		const most = Math.max(...all.map((p) => p.hi));
		const top = f.series.some((s) => s.limit) && most > 1.6 * Math.max(...results) ?
			1.6 * Math.max(...results) : undefined;
		const axis = {label: f.x.label, type: f.x.log ? "log" : "linear", tickFormat: x};
		if (f.x.log) { // powers of two: of others D3 leaves labels out
			axis.base = 2;
			axis.ticks = [];
			for (let v = 2 ** Math.ceil(Math.log2(xs[0])); v <= xs.at(-1); v *= 2) {
				axis.ticks.push(v);
			}
			const step = Math.ceil(axis.ticks.length / few);
			axis.ticks = axis.ticks.filter((_, i) => i % step === 0);
		} else if (f.x.whole) {
			const step = Math.ceil(xs.length / few);
			axis.ticks = xs.filter((_, i) => i % step === 0);
		} else {
			axis.ticks = few;
		}
		const plot = Plot.plot({width, height: Math.min(360, Math.max(240, width * 0.55)),
			marginLeft: 64, marginBottom: 40, x: axis,
			y: {label: f.y.label, grid: true, zero: !f.y.log, nice: true, tickFormat: y,
				...(top && {domain: [0, top]})},
			marks});
		const told = all.map((p) => ({x: p.x, y: p.y, text: `${p.name}: ${y(p.y)} ${f.y.label} at ` +
			`${x(p.x)} ${f.x.label}` + (p.lo !== p.hi ? `, ${y(p.lo)} to ${y(p.hi)}` : "")}));
		return [entries.length > 1 || f.series[0].limit ? legend(entries) : null, plot, told];
	}

	// Room for the names at the left of bars.
	function names(f, width) {
		const wide = width >= narrow;
		const longest = Math.max(...f.bars.map((b) => b.name.length));
		const marginLeft = Math.min(wide ? 240 : 150, 24 + 7 * longest);
		const cut = Math.floor((marginLeft - 16) / 6.6);
		const name = (n) => { // what tells names apart is often at their end
			const last = Math.floor(cut / 2);
			return n.length > cut ? `${n.slice(0, cut - last - 1)}…${n.slice(-last)}` : n;
		};
		return {wide, marginLeft, y: {label: null, domain: f.bars.map((b) => b.name), tickFormat: name}};
	}

	function bars(f, width) {
		const {wide, marginLeft, y} = names(f, width);
		const value = format(f.x);
		const marks = [], entries = [], rows = [];
		if (f.kind === "stacks") {
			const parts = [...new Set(f.bars.flatMap((b) => (b.parts || []).map((p) => p.name)))];
			for (const b of f.bars) {
				let at = 0;
				for (const p of b.parts || []) {
					rows.push({bar: b.name, name: p.name, x1: at, x2: at + p.value,
						value: p.value, fill: colour(f.hues[p.name])});
					at += p.value;
				}
			}
			parts.forEach((p) => entries.push({name: p, colour: colour(f.hues[p])}));
		} else {
			for (const b of f.bars) {
				rows.push({bar: b.name, name: b.name, x1: 0, x2: b.value, value: b.value,
					lo: b.lo ?? b.value, hi: b.hi ?? b.value, limit: b.limit, fill: colour(0)});
			}
		}
		marks.push(Plot.barX(rows, {y: "bar", x1: "x1", x2: "x2", fill: "fill", insetTop: 3,
			insetBottom: 3, stroke: "var(--back)", strokeWidth: 1}));
		if (f.kind === "spans") {
			marks.push(Plot.ruleY(rows, {y: "bar", x1: "lo", x2: "hi", stroke: "var(--text)",
				strokeWidth: 2}));
			marks.push(Plot.tickX(rows.filter((r) => r.limit), {y: "bar", x: "limit",
				stroke: "var(--limit)", strokeWidth: 3, insetTop: 1, insetBottom: 1}));
			marks.push(Plot.text(rows, {y: "bar", x: (r) => Math.max(r.hi, r.limit || 0), text: (r) => value(r.value), dx: 6,
				textAnchor: "start", fill: "var(--text)"}));
		}
		marks.push(Plot.tip(rows, Plot.pointer({y: "bar", x: (r) => (r.x1 + r.x2) / 2, ariaHidden: true,
			title: (r) => `${r.bar}\n${r.name}: ${value(r.value)}` +
				(r.lo !== undefined && r.lo !== r.hi ?
					`\n${value(r.lo)} to ${value(r.hi)}` : "") +
				(r.limit ? `\nlimit ${value(r.limit)}` : "")})));
		const plot = Plot.plot({width, height: 60 + (f.bars.length > 12 ? 24 : 34) * f.bars.length, marginLeft,
			marginRight: f.kind === "spans" ? 64 : 24, marginBottom: 40,
			x: {label: f.x.label, grid: true, zero: true, tickFormat: value,
				ticks: f.x.share ? (wide ? 5 : 3) : wide ? 8 : 4},
			y, color: {type: "identity"}, marks});
		if (rows.some((r) => r.limit)) {
			entries.push({name: "reached", colour: colour(0)},
				{name: "limit", colour: "var(--limit)"});
		}
		return [entries.length > 0 ? legend(entries) : null, plot, rows.map((r) => ({
			x: (r.x1 + r.x2) / 2, y: r.bar, text: `${r.bar}: ` +
				(r.name === r.bar ? "" : `${r.name} `) + `${value(r.value)} ${f.x.label}` +
				(r.limit ? `, limit ${value(r.limit)}` : "")}))];
	}

	function matrix(f, width) {
		const {marginLeft, y} = names(f, width);
		const value = format(f.x);
		const rows = f.bars.flatMap((b) => {
			const sum = b.parts.reduce((s, p) => s + p.value, 0);
			return b.parts.map((p, i) => ({bar: b.name, name: p.name, value: p.value, x: i + 0.5,
				share: sum > 0 ? p.value / sum : 0}));
		});
		const columns = f.bars[0].parts.map((p) => p.name);
		const text = (r) => `${r.bar}, predicted as ${r.name}: ${value(r.value)} ${f.x.label}, ` +
			`${+(100 * r.share).toFixed(1)} %`;
		const marks = [
			Plot.barX(rows, {x1: (r) => r.x - 0.5, x2: (r) => r.x + 0.5, y: "bar", fill: "var(--c1)",
				fillOpacity: (r) => 0.04 + 0.3 * r.share, inset: 1}),
			Plot.tip(rows, Plot.pointer({x: "x", y: "bar", title: text, ariaHidden: true}))];
		if ((width - marginLeft) / columns.length > 34) {
			marks.splice(1, 0, Plot.text(rows, {x: "x", y: "bar", text: (r) => value(r.value),
				fill: "var(--text)"}));
		}
		const plot = Plot.plot({width, height: 70 + 30 * f.bars.length, marginLeft, marginBottom: 40,
			x: {label: "prediction", domain: [0, columns.length], ticks: columns.map((_, i) => i + 0.5),
				tickFormat: (v) => columns[Math.floor(v)]},
			y, opacity: {type: "identity"}, marks});
		return [null, plot, rows.map((r) => ({x: r.x, y: r.bar, text: text(r)}))];
	}

	// Arrow keys walk through a figure's values: the pointer is moved to each, and the line below the
	// figure says it, also to those who hear the page.
	function walk(plot, told, line) {
		let at = -1;
		const svg = plot.matches("svg") ? plot : plot.querySelector("svg");
		const show = (to) => {
			at = Math.max(0, Math.min(told.length - 1, to));
			const x = plot.scale("x"), y = plot.scale("y"), box = svg.getBoundingClientRect();
			const shrunk = box.width / svg.width.baseVal.value;
			line.textContent = told[at].text;
			svg.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, pointerType: "mouse",
				clientX: box.left + shrunk * x.apply(told[at].x),
				clientY: box.top + shrunk * (y.apply(told[at].y) + (y.bandwidth || 0) / 2)}));
		};
		const leave = () => {
			line.textContent = "";
			svg.dispatchEvent(new PointerEvent("pointerleave", {pointerType: "mouse"}));
		};
		svg.addEventListener("keydown", (e) => {
			const to = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1,
				Home: 0, End: told.length - 1}[e.key];
			if (e.key === "Escape") {
				leave();
			} else if (to !== undefined && told.length > 0) {
				e.preventDefault();
				show(to);
			}
		});
		svg.addEventListener("blur", leave);
		svg.setAttribute("tabindex", "0");
	}

	const kinds = {lines, stacks: bars, spans: bars, matrix};

	function draw(print) {
		figures.forEach((f, i) => {
			const to = document.getElementById(`figure-${i}`);
			const width = print ? 520 : Math.max(280, Math.floor(to.clientWidth));
			try {
				const [key, plot, told] = kinds[f.kind](f, width);
				plot.setAttribute("role", "img"); // of which parts have no names
				plot.querySelectorAll("g[aria-label]").forEach((g) => g.setAttribute("aria-hidden", true));
				plot.setAttribute("aria-label",
					`${f.title}. Arrow keys walk through the values, which are in the table below, too.`);
				const line = document.createElement("p");
				line.className = "told";
				line.setAttribute("aria-live", "polite");
				walk(plot, told, line);
				to.replaceChildren(...[key, plot, line].filter(Boolean));
			} catch (e) {
				failures.push(`${f.title}: ${e.message}`);
				to.textContent = `This figure could not be drawn (${e.message}); ` +
					"its values are below.";
			}
		});
	}

	draw(false);
	let width = window.innerWidth, waiting = 0;
	window.addEventListener("resize", () => {
		if (window.innerWidth === width) {
			return;
		}
		width = window.innerWidth;
		clearTimeout(waiting);
		waiting = setTimeout(() => draw(false), 150);
	});
	window.addEventListener("beforeprint", () => draw(true));
	window.addEventListener("afterprint", () => draw(false));
	window.addEventListener("figures", () => draw(false)); // that are others, on a live page
	root.dataset.state = failures.length > 0 ? "failed" : "ready";
	root.dataset.failures = failures.join("; ");
	root.dataset.overflow = String(Math.max(0, root.scrollWidth - root.clientWidth));
})();
