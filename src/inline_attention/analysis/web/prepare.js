// From a picture to the model's input: resizing as Pillow does it, a center crop, and normalization.
// Pixels are { width, height, values }, three bytes each, row by row.
"use strict";
const MOST_PIXELS = 2 ** 24; // larger pictures are reduced by the browser first

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const FILTERS = {
  // reach of the filter, and its value at a distance of at most that
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => 1 - Math.abs(x)],
  hamming: [1, (x) => sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x))],
  bicubic: [2, (x) => {
    const d = Math.abs(x);
    return d < 1 ? (1.5 * d - 2.5) * d * d + 1 : ((-0.5 * d + 2.5) * d - 4) * d + 2;
  }],
  lanczos: [3, (x) => sinc(x) * sinc(x / 3)],
};

// For every new place along an axis: the first old place that it depends on, and the weights from there on.
function resamplingTable(before, after, interpolation) {
  const ratio = before / after;
  if (interpolation === "nearest")
    return Array.from({ length: after }, (_, i) => [Math.min(before - 1, Math.floor((i + 0.5) * ratio)), [1]]);
  const [reach, filter] = FILTERS[interpolation];
  const stretch = Math.max(1, ratio); // a smaller picture averages over more pixels
  return Array.from({ length: after }, (_, i) => {
    const center = (i + 0.5) * ratio;
    const first = Math.max(0, Math.trunc(center - reach * stretch + 0.5));
    const end = Math.min(before, Math.trunc(center + reach * stretch + 0.5));
    const weights = [];
    for (let place = first; place < end; place++) {
      const distance = (place + 0.5 - center) / stretch;
      weights.push(Math.abs(distance) < reach || interpolation === "box" ? filter(distance) : 0);
    }
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return [first, weights.map((weight) => weight / sum)];
  });
}

// Resample along rows, then along columns, each rounded to bytes.
function resize(pixels, width, height, interpolation) {
  let { values } = pixels;
  const across = (table, rows, before, after) => {
    const result = new Uint8ClampedArray(rows * after * 3);
    for (let row = 0; row < rows; row++)
      table.forEach(([first, weights], column) => {
        let [red, green, blue] = [0.5, 0.5, 0.5];
        let from = (row * before + first) * 3;
        for (const weight of weights) {
          red += weight * values[from++];
          green += weight * values[from++];
          blue += weight * values[from++];
        }
        // Not by the array's own rounding, which takes a half to the even number.
        result.set([Math.floor(red), Math.floor(green), Math.floor(blue)], (row * after + column) * 3);
      });
    return result;
  };
  const down = (table, columns, after) => {
    const result = new Uint8ClampedArray(after * columns * 3), length = columns * 3;
    const sums = new Float64Array(length);
    table.forEach(([first, weights], row) => {
      sums.fill(0.5);
      weights.forEach((weight, index) => {
        const start = (first + index) * length;
        for (let place = 0; place < length; place++) sums[place] += weight * values[start + place];
      });
      for (let place = 0; place < length; place++) result[row * length + place] = Math.floor(sums[place]);
    });
    return result;
  };
  if (width !== pixels.width)
    values = across(resamplingTable(pixels.width, width, interpolation), pixels.height, pixels.width, width);
  if (height !== pixels.height) values = down(resamplingTable(pixels.height, height, interpolation), width, height);
  return { width, height, values };
}

function crop(pixels, left, top, width, height) {
  const values = new Uint8ClampedArray(width * height * 3); // black outside of the picture
  for (let row = Math.max(0, -top); row < Math.min(height, pixels.height - top); row++) {
    const from = Math.max(0, left), end = Math.min(pixels.width, left + width);
    const start = (row + top) * pixels.width;
    values.set(pixels.values.subarray((start + from) * 3, (start + end) * 3), (row * width + from - left) * 3);
  }
  return { width, height, values };
}

function roundHalfToEven(x) {
  const low = Math.floor(x);
  return x - low === 0.5 ? low + (low % 2) : Math.round(x);
}

// Resize and crop to [height, width], as the model's own transform does at its own size.
function fit(pixels, [height, width], { interpolation, crop_pct, crop_mode, largest_aspect }) {
  const longest = largest_aspect * Math.min(pixels.width, pixels.height);
  const [keptWidth, keptHeight] = [Math.min(pixels.width, longest), Math.min(pixels.height, longest)];
  if (keptWidth < pixels.width || keptHeight < pixels.height) {
    const [left, top] = [(pixels.width - keptWidth) >> 1, (pixels.height - keptHeight) >> 1];
    pixels = crop(pixels, left, top, keptWidth, keptHeight);
  }
  let [newHeight, newWidth] = [height, width].map((side) => Math.floor(side / crop_pct));
  if (crop_mode !== "squash") {
    if (newHeight === newWidth) {
      const short = Math.min(pixels.width, pixels.height), side = newWidth;
      [newHeight, newWidth] = [pixels.height, pixels.width].map((old) => Math.floor((side * old) / short));
    } else {
      const ratio = Math.min(pixels.height / newHeight, pixels.width / newWidth);
      [newHeight, newWidth] = [pixels.height, pixels.width].map((old) => roundHalfToEven(old / ratio));
    }
  }
  const resized = resize(pixels, newWidth, newHeight, interpolation);
  const offset = (outer, inner) => (outer < inner ? -((inner - outer) >> 1) : roundHalfToEven((outer - inner) / 2));
  return crop(resized, offset(newWidth, width), offset(newHeight, height), width, height);
}

// Float32 [3, height, width].
function normalize({ width, height, values }, { mean, std }) {
  const size = width * height, result = new Float32Array(3 * size);
  for (let channel = 0; channel < 3; channel++)
    for (let place = 0; place < size; place++)
      result[channel * size + place] = (values[place * 3 + channel] / 255 - mean[channel]) / std[channel];
  return result;
}

// Pixels of an image, a bitmap or a video, on white where it is transparent.
function readPixels(source, width, height) {
  const scale = Math.min(1, Math.sqrt(MOST_PIXELS / (width * height)));
  [width, height] = [width, height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.drawImage(source, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const values = new Uint8ClampedArray(width * height * 3);
  for (let from = 0, to = 0; from < data.length; from += 4) {
    values[to++] = data[from];
    values[to++] = data[from + 1];
    values[to++] = data[from + 2];
  }
  return { width, height, values };
}
