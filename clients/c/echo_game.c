/* The echo game: plays whatever the service shows, by fixed rules, so that `penstock check-client` knows each byte.
 *
 *     cc -O2 -o echo_game echo_game.c penstock_game.c
 *     ./echo_game HOST PORT [EPISODES]
 */
#include "penstock_game.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEATS 3
#define MOST_COLUMNS 256

typedef struct {
  unsigned long rows;      /* that it has shown since the process began */
  unsigned long episode;   /* number of the present or the next one */
  unsigned long actions;   /* in the present episode */
  int is_playing;
} echo_seat;

/* Lists the spaces of single arrays, in the order of columns. Returns how many there are. */
static size_t list_leaves(const char *space, const char **leaves, size_t count) {
  const char *kind = penstock_json_first(space), *content = penstock_json_next(kind);
  int is_dict = penstock_json_member(space, "Dict") != NULL;
  if (!is_dict && !penstock_json_member(space, "Tuple")) {
    if (count < MOST_COLUMNS) leaves[count] = space;
    return count + 1;
  }
  for (const char *part = penstock_json_first(content); part; part = penstock_json_next(part))
    count = list_leaves(is_dict ? penstock_json_next(penstock_json_first(part)) : part, leaves, count);
  return count;
}

/* Returns element `index` of nested lists, or the number that stands for all elements. */
static int64_t element_of(const char *bounds, size_t *index) {
  int64_t number = 0;
  if (*bounds != '[') {
    (*index)--;
    penstock_json_integer(bounds, &number);
    return number;
  }
  for (const char *at = penstock_json_first(bounds); at && *index != (size_t)-1; at = penstock_json_next(at))
    number = element_of(at, index);
  return number;
}

/* Returns the least value of an element of a space of integers, and how many it has, at most 97. */
static int64_t range_of(const char *space, size_t element, int64_t *count) {
  const char *content, *starts;
  size_t index = element;
  *count = 2;
  if ((content = penstock_json_member(space, "Discrete")) != NULL) {
    int64_t start = 0;
    penstock_json_integer(penstock_json_first(content), count);
    penstock_json_integer(penstock_json_next(penstock_json_first(content)), &start);
    return start;
  }
  if ((content = penstock_json_member(space, "MultiDiscrete")) != NULL) {
    starts = penstock_json_next(penstock_json_first(content));
    *count = element_of(penstock_json_first(content), &index);
    index = element;
    return element_of(starts, &index);
  }
  if ((content = penstock_json_member(space, "Box")) != NULL) {
    int64_t low = element_of(penstock_json_first(content), &index);
    index = element;
    uint64_t span = (uint64_t)element_of(penstock_json_next(penstock_json_first(content)), &index) - (uint64_t)low;
    *count = span < 96 ? (int64_t)span + 1 : 97;
    return low;
  }
  return 0; /* MultiBinary */
}

static void fill_row(const penstock_welcome *welcome, const char **leaves, uint32_t seat, unsigned long k, uint8_t *row) {
  unsigned long e = 0;
  for (size_t c = 0; c < welcome->columns_count; c++) {
    const penstock_column *column = &welcome->columns[c];
    for (size_t i = 0; i < column->count; i++, e++) {
      uint8_t *element = row + column->offset + i * column->nbytes;
      unsigned long v = (k * 31 + seat * 7 + e * 3) % 97;
      if (column->dtype[1] == 'f' && column->nbytes == 4) {
        float number = (float)v / 97;
        memcpy(element, &number, sizeof number);
      } else if (column->dtype[1] == 'f') {
        double number = (double)v / 97;
        memcpy(element, &number, sizeof number);
      } else {
        int64_t count = 2, low = column->dtype[1] == 'b' ? 0 : range_of(leaves[c], i, &count);
        int64_t number = low + (int64_t)(v % (unsigned long)count);
        if (!strcmp(column->name, "action_mask")) number = 1;
        memcpy(element, &number, column->nbytes); /* the low bytes are the first ones */
      }
    }
  }
}

static float checksum(const uint8_t *action, size_t nbytes) {
  unsigned sum = 0;
  for (size_t i = 0; i < nbytes; i++) sum = (sum * 33 + action[i]) % 1009;
  return (float)sum / 1009;
}

/* Adds the next row of a seat. */
static void add_row(penstock_game *game, const char **leaves, uint32_t seat, echo_seat *state) {
  const penstock_welcome *welcome = penstock_welcome_of(game);
  unsigned flags = 0;
  float reward = 0;
  if (!state->is_playing) {
    flags = PENSTOCK_FIRST;
    state->is_playing = 1;
    state->actions = 0;
  } else {
    reward = checksum(penstock_action(game, seat), welcome->action_nbytes);
    state->actions++;
    if (state->actions == 3 + (seat + 2 * state->episode) % 5) {
      flags = state->episode % 2 ? PENSTOCK_TRUNCATED : PENSTOCK_TERMINATED;
      state->is_playing = 0;
      state->episode++;
    }
  }
  uint8_t *row = penstock_row(game, seat, flags, reward);
  if (row) fill_row(welcome, leaves, seat, state->rows++, row);
}

/* An episode that was broken off is not resumed. */
static void break_off(echo_seat *state) {
  state->episode += (unsigned long)state->is_playing;
  state->is_playing = 0;
}

int main(int count, char **arguments) {
  if (count < 3) {
    fprintf(stderr, "usage: echo_game HOST PORT [EPISODES]\n");
    return 2;
  }
  char error[PENSTOCK_ERROR_NBYTES];
  const char *leaves[MOST_COLUMNS];
  penstock_options options;
  echo_seat seats[SEATS];
  unsigned long episodes = count > 3 ? strtoul(arguments[3], NULL, 10) : 20;
  memset(&options, 0, sizeof options);
  memset(seats, 0, sizeof seats);
  options.host = arguments[1];
  options.port = (uint16_t)atoi(arguments[2]);
  options.seats = SEATS;
  options.patience_s = 60;
  options.name = "echo game in C";

  penstock_game *game = penstock_connect(&options, error);
  if (!game) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  const penstock_welcome *welcome = penstock_welcome_of(game);
  int is_new = 1;
  for (unsigned long round = 0;; round++) {
    if (is_new && list_leaves(penstock_json_member(welcome->json, "observation"), leaves, 0) != welcome->columns_count) {
      fprintf(stderr, "the columns of WELCOME are not those of its space, or more than %d\n", MOST_COLUMNS);
      return 1;
    }

    /* In every third round seat 2 has a STEP of its own, as if it were its turn. */
    int is_over = 1;
    for (uint32_t seat = 0; seat < SEATS; seat++) {
      if (seats[seat].episode == episodes) continue;
      is_over = 0;
      if (seat == 2 && round % 3 == 2) penstock_send(game);
      add_row(game, leaves, seat, &seats[seat]);
    }
    if (is_over) break;

    is_new = penstock_step(game) < 0;
    if (is_new) {
      fprintf(stderr, "%s\n", penstock_error(game));
      for (uint32_t seat = 0; seat < SEATS; seat++) break_off(&seats[seat]);
      if (penstock_reconnect(game)) {
        fprintf(stderr, "%s\n", penstock_error(game));
        return 1;
      }
    }
    for (uint32_t seat = 0; seat < SEATS; seat++) {
      if (penstock_phase_of(game, seat) != PENSTOCK_AT_FAULT || !seats[seat].is_playing) continue;
      fprintf(stderr, "%s\n", penstock_error(game));
      break_off(&seats[seat]);
    }
  }
  penstock_close(game);
  return 0;
}
