// Draws the charts of the page from the values in #charts. No libraries; see charts.py for the values.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 250, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 42;

  const html = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const svg = (tag, attributes = {}, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const color = (name) => `var(--${name})`;
  const format = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  };

  const showTip = (event, text) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(Math.max(event.clientX + 14, 6), innerWidth - box.width - 6);
    const above = event.clientY - box.height - 12;
    tip.style.left = `${x}px`;
    tip.style.top = `${above > 6 ? above : event.clientY + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  addEventListener("scroll", hideTip, { passive: true });

  // A scale maps values to pixels and names its ticks. Logarithmic ones take positive values only.
  const scale = (low, high, from, to, log) => {
    if (log) {
      const a = Math.log10(low), b = Math.log10(high) === a ? a + 1 : Math.log10(high);
      const map = (value) => from + ((Math.log10(value) - a) / (b - a)) * (to - from);
      const ticks = [];
      const every = Math.max(1, Math.ceil((b - a) / 5));
      for (let power = Math.ceil(a); power <= Math.floor(b); power += every) ticks.push(10 ** power);
      if (ticks.length < 3) for (let power = Math.floor(a); power <= b; power++) {
        for (const factor of [2, 5]) {
          const tick = factor * 10 ** power;
          if (tick >= low && tick <= high) ticks.push(tick);
        }
      }
      return { map, ticks };
    }
    if (high === low) high = low + (Math.abs(low) || 1);
    const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
    const ticks = [];
    for (let k = Math.ceil(low / step); k * step <= high * (1 + 1e-9); k++) ticks.push(k * step);
    return { map: (value) => from + ((value - low) / (high - low)) * (to - from), ticks };
  };

  const tickText = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(0).replace("e+", "e");
    return size >= 1000 ? value.toLocaleString("en") : String(Number(value.toPrecision(6)));
  };

  const frame = (figure, width, chart, yScale) => {
    const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": chart.title });
    for (const tick of yScale.ticks) {
      const y = yScale.map(tick);
      root.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y, class: "axis" }));
      root.append(svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, tickText(tick)));
    }
    const middle = (TOP + HEIGHT - BOTTOM) / 2;
    root.append(svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, chart.x));
    root.append(svg("text", { transform: `translate(12 ${middle}) rotate(-90)`, "text-anchor": "middle" }, chart.y));
    return root;
  };

  const yRange = (values, log, fromZero) => {
    const usable = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
    if (!usable.length) return log ? [0.1, 1] : [0, 1];
    let low = Math.min(...usable), high = Math.max(...usable);
    if (log) return [low * 0.8, high * 1.25];
    if (fromZero) return [Math.min(0, low), high || 1];
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    return [low - margin, high + margin];
  };

  // Of how many categories one is named, so that names do not overlap in slots of so many pixels.
  const labelStep = (names, slot) => Math.ceil((Math.max(...names.map((name) => name.length)) * 7 + 8) / slot);

  const xText = (chart, point) => (chart.categories ? chart.categories[point[0]] : format(point[0]));

  const drawXY = (figure, chart, state, width) => {
    const series = chart.series.filter((_, place) => !state.hidden.has(place));
    const points = series.flatMap((item) => item.points);
    const xs = points.map((point) => point[0]);
    const y = scale(...yRange(points.map((point) => point[1]), state.log, false), HEIGHT - BOTTOM, TOP, state.log);
    const names = chart.categories; // then x is a place among them
    const ends = names ? [-0.5, names.length - 0.5] : xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    const x = scale(...ends, LEFT, width - RIGHT, false);
    const root = frame(figure, width, chart, y);
    const every = names ? labelStep(names, (width - LEFT - RIGHT) / names.length) : 1;
    for (const tick of names ? names.keys() : x.ticks) {
      if (names && tick % every) continue;
      root.append(svg("text", { x: x.map(tick), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, names ? names[tick] : tickText(tick)));
    }
    const places = [];
    for (const item of series) {
      const usable = item.points.filter((point) => Number.isFinite(point[1]) && (!state.log || point[1] > 0));
      const positions = usable.map((point) => [x.map(point[0]), y.map(point[1])]);
      if (chart.kind === "line") {
        const path = positions.map(([a, b], place) => `${place ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
        root.append(svg("path", { d: path, fill: "none", "stroke-width": 2, "stroke-linejoin": "round", style: `stroke:${color(item.color)}` }));
      }
      usable.forEach((point, place) => {
        const [cx, cy] = positions[place];
        const radius = chart.kind === "line" ? (usable.length > 40 ? 0 : 2.5) : 3.5;
        if (radius) root.append(svg("circle", { cx, cy, r: radius, style: `fill:${color(item.color)}`, opacity: chart.kind === "line" ? 1 : 0.75 }));
        places.push({ x: cx, y: cy, point, name: item.name });
      });
    }
    const cursor = svg("circle", { r: 6, fill: "none", "stroke-width": 2, style: "stroke:var(--ink)", visibility: "hidden" });
    root.append(cursor);
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect(), ratio = width / box.width;
      const px = (event.clientX - box.left) * ratio, py = (event.clientY - box.top) * ratio;
      const weight = chart.kind === "line" ? 0.2 : 1; // along a line, the nearest update counts most
      let best = null, nearest = Infinity;
      for (const place of places) {
        const distance = (place.x - px) ** 2 + weight * (place.y - py) ** 2;
        if (distance < nearest) { nearest = distance; best = place; }
      }
      if (!best) return;
      cursor.setAttribute("cx", best.x); cursor.setAttribute("cy", best.y); cursor.setAttribute("visibility", "visible");
      const head = best.point[2] ? `${best.point[2]}\n` : "";
      showTip(event, `${head}${best.name}\n${chart.x}: ${xText(chart, best.point)}\n${chart.y}: ${format(best.point[1])}`);
    });
    root.addEventListener("pointerleave", () => { hideTip(); cursor.setAttribute("visibility", "hidden"); });
    return root;
  };

  const drawBars = (figure, chart, state, width) => {
    const series = chart.series.filter((_, place) => !state.hidden.has(place));
    const [low, high] = yRange(series.flatMap((item) => item.values), state.log, true);
    const y = scale(low, high, HEIGHT - BOTTOM, TOP, state.log);
    const root = frame(figure, width, chart, y);
    const slot = (width - LEFT - RIGHT) / chart.categories.length;
    const bar = Math.min((slot * 0.8) / Math.max(series.length, 1), 26);
    const every = labelStep(chart.categories, slot);
    chart.categories.forEach((category, place) => {
      const middle = LEFT + slot * (place + 0.5);
      if (place % every === 0) {
        root.append(svg("text", { x: middle, y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, category));
      }
      series.forEach((item, order) => {
        const value = item.values[place];
        if (!Number.isFinite(value) || (state.log && value <= 0)) return;
        const top = y.map(value), base = state.log ? HEIGHT - BOTTOM : y.map(0);
        const left = middle + (order - series.length / 2) * bar;
        root.append(svg("rect", { x: left + 0.5, width: Math.max(bar - 1, 0.6), y: Math.min(top, base), height: Math.max(Math.abs(base - top), 0.5), style: `fill:${color(item.color)}` }));
      });
      const area = svg("rect", { x: LEFT + slot * place, y: TOP, width: slot, height: HEIGHT - BOTTOM - TOP, fill: "transparent" });
      const lines = series.map((item) => `${item.name}: ${format(item.values[place])}`);
      area.addEventListener("pointermove", (event) => showTip(event, [`${chart.x} ${category}`, ...lines].join("\n")));
      area.addEventListener("pointerleave", hideTip);
      root.append(area);
    });
    return root;
  };

  const numbers = (chart) => {
    const table = html("table");
    const row = (cells, tag) => table.append(html("tr", {}, ...cells.map((cell) => html(tag, { textContent: cell }))));
    if (chart.kind === "bars") {
      row([chart.x, ...chart.series.map((item) => item.name)], "th");
      chart.categories.forEach((name, place) => row([name, ...chart.series.map((item) => format(item.values[place]))], "td"));
    } else {
      row(["", chart.x, chart.y], "th");
      for (const item of chart.series) for (const point of item.points) {
        row([point[2] ? `${item.name}, ${point[2]}` : item.name, xText(chart, point), format(point[1])], "td");
      }
    }
    return html("div", { className: "scroll" }, table);
  };

  const select = (name, values) => {
    const element = html("select", {}, ...values.map((value) => html("option", { value, textContent: value })));
    return [element, html("label", {}, `${name} `, element)];
  };

  const plot = (figure, chart) => {
    const state = { hidden: new Set(), log: chart.log };
    const place = html("div");
    const draw = () => {
      const width = Math.max(figure.clientWidth - 24, 200);
      place.replaceChildren((chart.kind === "bars" ? drawBars : drawXY)(figure, chart, state, width));
    };
    const legend = html("div", { className: "legend" });
    chart.series.forEach((item, order) => {
      const swatch = html("i");
      swatch.style.background = color(item.color);
      const button = html("button", { type: "button", title: "show or hide" }, swatch, item.name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const hidden = !state.hidden.delete(order);
        if (hidden) state.hidden.add(order);
        button.setAttribute("aria-pressed", String(!hidden));
        draw();
      });
      legend.append(button);
    });
    if (chart.can_log) {
      const box = html("input", { type: "checkbox", checked: state.log });
      box.addEventListener("change", () => { state.log = box.checked; draw(); });
      legend.append(html("label", {}, box, "log"));
    }
    const details = html("details", {}, html("summary", { textContent: "Numbers" }));
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(numbers(chart));
    });
    if (chart.choices) {
      const [choice, label] = select(chart.pick, chart.choices.map((item) => item.name));
      choice.addEventListener("change", () => {
        chart.series = chart.choices[choice.selectedIndex].series;
        draw();
        if (details.childElementCount > 1) details.lastChild.replaceWith(numbers(chart));
      });
      figure.append(html("div", { className: "pick" }, label));
    }
    figure.append(legend, place, details);
    let width = 0;
    new ResizeObserver(() => {
      if (figure.clientWidth !== width) { width = figure.clientWidth; draw(); }
    }).observe(figure);
  };

  const rgb = (name) => {
    const probe = html("span");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color.match(/[\d.]+/g).map(Number);
    probe.remove();
    return found;
  };

  const heatmap = (canvas, rows, split, top) => {
    const gap = 1, columns = rows[0].length + (split ? gap : 0);
    canvas.width = columns; canvas.height = rows.length;
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows.length);
    const low = rgb("card"), high = rgb("transfer"), between = rgb("line");
    rows.forEach((row, y) => {
      for (let x = 0; x < columns; x++) {
        const inGap = split && x === split;
        const share = inGap ? 0 : Math.sqrt(Math.min(row[x - (split && x > split ? gap : 0)] / top, 1));
        for (let channel = 0; channel < 3; channel++) {
          image.data[4 * (y * columns + x) + channel] = inGap ? between[channel] : low[channel] + share * (high[channel] - low[channel]);
        }
        image.data[4 * (y * columns + x) + 3] = 255;
      }
    });
    context.putImageData(image, 0, 0);
  };

  const maps = (figure, chart) => {
    const layers = [...new Set(chart.maps.map((map) => map.layer))], heads = [...new Set(chart.maps.map((map) => map.head))];
    const [layer, layerLabel] = select("layer", layers), [head, headLabel] = select("head", heads);
    const panels = html("div", { className: "panels" });
    const jump = chart.keys.findIndex((key, place) => place && key !== chart.keys[place - 1] + 1);
    const split = Math.max(jump, 0);
    const draw = () => {
      const map = chart.maps.find((item) => item.layer === Number(layer.value) && item.head === Number(head.value));
      const shown = chart.panels.filter((panel) => map && map[panel.key]);
      const top = Math.max(...shown.flatMap((panel) => map[panel.key].flat()), 1e-9);
      panels.replaceChildren(...shown.map((panel) => {
        const canvas = html("canvas"), rows = map[panel.key];
        heatmap(canvas, rows, split, top);
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", `${panel.name}, layer ${map.layer}, head ${map.head}`);
        canvas.addEventListener("pointermove", (event) => {
          const box = canvas.getBoundingClientRect();
          const y = Math.min(Math.floor(((event.clientY - box.top) / box.height) * rows.length), rows.length - 1);
          let x = Math.floor(((event.clientX - box.left) / box.width) * canvas.width);
          if (split && x === split) return hideTip();
          if (split && x > split) x -= 1;
          if (!rows[y] || rows[y][x] === undefined) return hideTip();
          showTip(event, `query ${chart.queries[0] + y}, key ${chart.keys[x]}\nweight ${format(rows[y][x])}`);
        });
        canvas.addEventListener("pointerleave", hideTip);
        return html("figure", {}, html("figcaption", { textContent: panel.name }), canvas);
      }));
    };
    layer.addEventListener("change", draw);
    head.addEventListener("change", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    const first = split ? `keys ${chart.keys[0]}–${chart.keys[split - 1]}, then ${chart.keys[split]}–${chart.keys.at(-1)}` : `keys ${chart.keys[0]}–${chart.keys.at(-1)}`;
    figure.append(html("div", { className: "pick" }, layerLabel, headLabel), panels, html("p", { className: "note", textContent: `Columns: ${first}. Colour: square root of the weight, one scale for all.` }));
    draw();
  };

  for (const figure of document.querySelectorAll("[data-chart]")) {
    const chart = charts[figure.dataset.chart];
    (chart.kind === "maps" ? maps : plot)(figure, chart);
  }
  document.documentElement.dataset.ready = "yes";
})();
