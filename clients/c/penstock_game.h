/* A game's end of `penstock serve` and `penstock serve-env` over TCP, in C99 (docs/games-protocol.md).
 *
 *     penstock_options options = {.port = 8900, .patience_s = 60};
 *     char error[PENSTOCK_ERROR_NBYTES];
 *     penstock_game *game = penstock_connect(&options, error);
 *     size_t obs = penstock_find_column(game, "obs")->offset;
 *
 *     uint8_t *row = penstock_row(game, 0, PENSTOCK_FIRST, 0);    // seat 0 begins an episode
 *     memcpy(row + obs, seen, sizeof seen);                       // and sees this
 *     if (penstock_step(game) < 0) penstock_reconnect(game);      // all seats begin anew then
 *     const uint8_t *action = penstock_action(game, 0);           // NULL: see penstock_phase_of
 *
 * A game is used by one thread at a time; different games share nothing. Memory is allocated while connecting, never
 * by a step. There is no TLS: beyond one host, let a tunnel such as stunnel carry the connection.
 */
#ifndef PENSTOCK_GAME_H
#define PENSTOCK_GAME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PENSTOCK_ERROR_NBYTES 512
#define PENSTOCK_MOST_AXES 8

/* What a row says about its seat; a sum of these. */
enum {
  PENSTOCK_FIRST = 1,      /* an episode begins */
  PENSTOCK_TERMINATED = 2, /* the last action has ended it */
  PENSTOCK_TRUNCATED = 4,  /* it is cut off, by a limit of time for example */
  PENSTOCK_LEAVES = 8      /* the seat is gone; the row's observation is not read */
};

/* What a seat does. */
typedef enum {
  PENSTOCK_IDLE,    /* it is in no episode */
  PENSTOCK_WAITS,   /* its row is sent, and not answered */
  PENSTOCK_ACTS,    /* it has the action for its last row */
  PENSTOCK_AT_FAULT /* its row was refused: it must begin a new episode */
} penstock_phase;

typedef struct {
  const char *host;        /* NULL: "127.0.0.1" */
  uint16_t port;           /* 0: 8800, where `penstock serve` listens; serve-env has 8900 */
  uint32_t seats;          /* episodes that are played at a time; 0: 1 */
  const char *token;       /* what the service asks for; NULL: nothing */
  const char *observation; /* the spaces of the game as JSON; NULL: those of the service are right */
  const char *action;
  const char *name;        /* of the game, for people who read messages; NULL: none */
  double patience_s;       /* so long connecting is tried again; 0: it is tried once */
} penstock_options;

/* An array in each row. */
typedef struct {
  const char *name;  /* "obs" or "action" where there is one array alone */
  const char *dtype; /* as numpy writes it: "<f4", "<i8", "|u1" */
  uint32_t axes;
  uint32_t shape[PENSTOCK_MOST_AXES];
  size_t count;      /* elements, the product of the shape */
  size_t nbytes;     /* of an element */
  size_t offset;     /* bytes from the beginning of the row, a multiple of nbytes */
} penstock_column;

/* What WELCOME says. It lives until the next reconnect. */
typedef struct {
  const penstock_column *columns; /* of an observation */
  size_t columns_count;
  size_t row_nbytes;
  penstock_column action;
  size_t action_nbytes;
  uint32_t seats;
  int learns;       /* whether a learner trains on what is played */
  const char *json; /* all of it: read it by the penstock_json functions */
} penstock_welcome;

typedef struct penstock_game penstock_game;

/* Connect. Returns NULL, and why in `error`, if the service refuses or nobody answers while there is patience. */
penstock_game *penstock_connect(const penstock_options *options, char error[PENSTOCK_ERROR_NBYTES]);

/* Connect again, after increasing pauses. All seats are idle then, and begin by PENSTOCK_FIRST; columns are to be
 * looked up again. Returns 0, or -1 if it was not possible: see `penstock_error`; it may be called again. */
int penstock_reconnect(penstock_game *game);

/* Leave the service, and free the memory. NULL is allowed. */
void penstock_close(penstock_game *game);

/* Returns whether there is a connection, as far as is known. */
int penstock_is_connected(const penstock_game *game);

const penstock_welcome *penstock_welcome_of(const penstock_game *game);

/* Returns a column of an observation, or NULL if there is none of that name. */
const penstock_column *penstock_find_column(const penstock_game *game, const char *name);

/* Add a row to the next STEP: what the last action of the seat has brought, and what it sees now.
 *
 * Returns the row, row_nbytes zeros at a multiple of 8 bytes in memory, to be filled before the next call of
 * `penstock_send`. Returns NULL if the seat does not exist, waits for its action or has a row already, if the STEP is
 * full (16 MiB: send it, then go on), or the connection is lost: see `penstock_error`. */
uint8_t *penstock_row(penstock_game *game, uint32_t seat, unsigned flags, float reward);

/* Send the rows that were added, if any. Returns 0, or -1 if the connection is lost. */
int penstock_send(penstock_game *game);

/* Receive until no seat waits, or for so many seconds: 0 only takes what has arrived, a negative number has no limit.
 * Returns the number of seats that still wait, or -1 if the connection is lost. */
int penstock_wait(penstock_game *game, double seconds);

/* `penstock_send`, then `penstock_wait` without a limit. */
int penstock_step(penstock_game *game);

penstock_phase penstock_phase_of(const penstock_game *game, uint32_t seat);

/* Returns the action for the last row of a seat, action_nbytes bytes at a multiple of 8, which live until its next
 * row is sent; NULL if it has none. */
const uint8_t *penstock_action(const penstock_game *game, uint32_t seat);

/* Returns the sentence of the last fault of a seat, or of what ended the connection. */
const char *penstock_error(const penstock_game *game);

/* JSON, of penstock_welcome.json. A value is a pointer to its first character. */

/* Returns the first element of an array, or the first key of an object; NULL if there is none. */
const char *penstock_json_first(const char *container);
/* Returns the next element; in an object the value behind a key, and the next key behind a value; NULL at the end. */
const char *penstock_json_next(const char *element);
/* Returns the value of a key, or NULL. */
const char *penstock_json_member(const char *object, const char *key);
/* Returns 0, or -1 if the value is no whole number of 64 bits. */
int penstock_json_integer(const char *value, int64_t *number);
/* Copy a text as UTF-8, cut to size - 1 bytes. Returns 0, or -1 if the value is no text. */
int penstock_json_text(const char *value, char *text, size_t size);

#ifdef __cplusplus
}
#endif

#endif
