/* Feeds mutations of a service's messages to the C client, which is built with sanitizers.
 *
 *     c_client_fuzz RUNS < WELCOME.json
 *
 * Exits with 0 if no message crashed the client or took more memory than it may, and prints how many WELCOMEs were
 * taken and how many refused, so that a fuzzer that only makes nonsense is seen.
 */
#include "penstock_game.c"

#define SEATS 3

static uint64_t state = 12;

static uint32_t random_below(uint32_t limit) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 33) % limit;
}

/* Changes some bytes: by chance, or to what means something in JSON; doubles or removes a part. */
static size_t mutate(uint8_t *bytes, size_t nbytes, size_t most) {
  static const char meaningful[] = "[]{}\",:0123456789-eE.\\u \0\377<|fiub48tn";
  for (uint32_t changes = 1 + random_below(4); changes && nbytes > 8; changes--) {
    size_t at = random_below((uint32_t)nbytes), length = random_below(32);
    if (length > nbytes - at) length = nbytes - at;
    switch (random_below(4)) {
      case 0:
        bytes[at] = (uint8_t)random_below(256);
        break;
      case 1:
        bytes[at] = (uint8_t)meaningful[random_below(sizeof meaningful - 1)];
        break;
      case 2:
        memmove(bytes + at, bytes + at + length, nbytes - at - length);
        nbytes -= length;
        break;
      default:
        if (nbytes + length > most) break;
        memmove(bytes + at + length, bytes + at, nbytes - at);
        nbytes += length;
    }
  }
  return nbytes;
}

/* Puts a message where received ones are, with a length that is right or not. */
static void arrive(penstock_game *game, uint32_t kind, const uint8_t *body, size_t nbytes) {
  uint32_t head[2];
  game->begin = 0;
  game->end = 8 + nbytes;
  head[0] = random_below(16) ? (uint32_t)nbytes + 4 : random_below(1u << 25);
  head[1] = random_below(64) ? kind : random_below(9);
  memcpy(game->received, head, sizeof head);
  memcpy(game->received + 8, body, nbytes);
}

/* Reads all that a game could of a WELCOME that was taken. */
static void use(penstock_game *game) {
  const penstock_welcome *welcome = penstock_welcome_of(game);
  char text[64];
  for (size_t i = 0; i < welcome->columns_count; i++) {
    const penstock_column *column = &welcome->columns[i];
    if (penstock_find_column(game, column->name) == NULL) abort();
    if (column->offset + column->count * column->nbytes > welcome->row_nbytes) abort();
  }
  for (const char *at = penstock_json_first(welcome->json); at; at = penstock_json_next(at))
    penstock_json_text(at, text, sizeof text);
}

int main(int count, char **arguments) {
  static uint8_t original[1 << 16], bytes[1 << 16];
  static const char *faults[] = {"{\"seat\": 1, \"field\": \"observation\", \"error\": \"the \\u00b1\\ud83d\\ude00 row\"}",
                                 "{\"seat\": null, \"field\": \"token\", \"error\": \"it is wrong\"}",
                                 "{\"reason\": \"the service ends\"}"};
  long runs = count > 1 ? atol(arguments[1]) : 10000, taken = 0;
  size_t length = fread(original, 1, sizeof original / 2, stdin);

  penstock_game *game = (penstock_game *)calloc(1, sizeof *game);
  game->socket = NO_SOCKET;
  game->seats = SEATS;
  game->capacity = LEAST_BUFFER;
  game->host = (char *)calloc(8, 1);
  game->received = (uint8_t *)calloc(game->capacity + 1, 1);
  game->phases = (uint8_t *)calloc(SEATS, 1);
  game->is_added = (uint8_t *)calloc(SEATS, 1);
  for (long run = 0; run < runs; run++) {
    size_t nbytes = length;
    memcpy(bytes, original, length);
    if (random_below(8)) nbytes = mutate(bytes, nbytes, sizeof bytes / 2);
    disconnect(game);
    game->waiting = 1;
    arrive(game, WELCOME, bytes, nbytes);
    if (handle_messages(game) || !game->is_welcome) continue;
    taken++;
    use(game);

    /* Seats wait, and what answers them is no better. */
    for (int messages = 0; messages < 8 && game->is_welcome; messages++) {
      memset(game->phases, PENSTOCK_WAITS, SEATS);
      game->waiting = SEATS;
      memset(bytes, 0, 256);
      uint32_t kind = random_below(2) ? ACT : FAULT;
      if (kind == ACT) {
        uint32_t rows = 1 + random_below(SEATS);
        nbytes = padded(8 + 4 * rows, 8) - 4 + rows * game->welcome.action_nbytes;
        if (nbytes > sizeof bytes / 2) break;
        memcpy(bytes, &rows, sizeof rows);
        for (uint32_t i = 0; i < rows; i++) bytes[4 + 4 * i] = (uint8_t)i;
      } else {
        const char *fault = faults[random_below(3)];
        nbytes = strlen(fault);
        memcpy(bytes, fault, nbytes);
      }
      if (random_below(2)) nbytes = mutate(bytes, nbytes, sizeof bytes / 2);
      if (nbytes + 8 > game->capacity) break;
      arrive(game, kind, bytes, nbytes);
      handle_messages(game);
      if (game->waiting > SEATS) abort();
    }
  }
  printf("%ld of %ld WELCOMEs were taken\n", taken, runs);
  penstock_close(game);
  return 0;
}
