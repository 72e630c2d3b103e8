/* The panels of one or more layers over the same rows, numbered in sequence: the threads' work. */
#pragma once
#include "linear.h"

static inline int64_t divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t panels_of(const struct linear *layer) {
  return divided(layer->out_features, PANEL);
}

static inline int64_t count_panels(const struct linear *const *layers, int count) {
  int64_t panels = 0;
  for (int i = 0; i < count; i++) panels += panels_of(layers[i]);
  return panels;
}

struct panel {
  const struct linear *layer;
  int64_t index, first_column; /* in the layer; in a row of all layers' results */
  int columns;                 /* PANEL, or fewer in a layer's last panel */
};

static inline struct panel panel_of(const struct linear *const *layers, int64_t number) {
  int64_t column = 0;
  for (; number >= panels_of(*layers); layers++) {
    number -= panels_of(*layers);
    column += (*layers)->out_features;
  }
  const int64_t left = (*layers)->out_features - number * PANEL;
  return (struct panel){*layers, number, column + number * PANEL, left < PANEL ? (int)left : PANEL};
}

/* With few rows memory is the bottleneck, and is read fastest in one run. */
static inline struct pieces share_panels(struct team team, int64_t count, int64_t rows) {
  return share_pieces(team, count, rows < 8 ? 7 : 6);
}
