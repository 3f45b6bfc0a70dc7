/* See penstock_game.h. Everything that arrives is checked before it is used: a service that sends what it should not
 * costs the connection, no memory and no crash. */
#ifndef _WIN32
#define _POSIX_C_SOURCE 200809L
#define _DARWIN_C_SOURCE
#endif

#include "penstock_game.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Rows are sent as they lie in memory, and the protocol is little-endian."
#endif

#ifdef _WIN32
#include <winsock2.h>
#include <ws2tcpip.h>
typedef SOCKET socket_type;
typedef DWORD socket_timeout;
typedef int io_size;
#define NO_SOCKET INVALID_SOCKET
#define poll WSAPoll
#define close_socket closesocket
#define was_interrupted() (WSAGetLastError() == WSAEINTR)
#define SHUT_WR SD_SEND
#else
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
typedef int socket_type;
typedef struct timeval socket_timeout;
typedef size_t io_size;
#define NO_SOCKET (-1)
#define close_socket close
#define was_interrupted() (errno == EINTR)
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

enum { HELLO = 1, WELCOME, STEP, ACT, FAULT, END };

#define PROTOCOL 1
#define DEFAULT_PORT 8800
#define MOST_NBYTES (16u << 20)   /* of a message */
#define LEAST_BUFFER (64u << 10)  /* holds every FAULT and END */
#define MOST_DEPTH 64             /* of JSON */
#define FIRST_PAUSE_S 0.1
#define LONGEST_PAUSE_S 5.0
#define DIAL_S 10.0    /* for a connection to be accepted */
#define ANSWER_S 30.0  /* for HELLO to be answered */
#define SEND_S 30      /* for a message to be taken */
#define FAREWELL_S 2.0 /* for END to be answered by the end of the connection */

struct penstock_game {
  char *host;
  char port[8];
  uint8_t *hello; /* the message, with its length */
  size_t hello_nbytes;
  double patience_s;
  uint32_t seats;

  socket_type socket;
  int is_welcome; /* whether WELCOME has come: until then `waiting` is 1 */
  int is_refused; /* whether connecting again would be of no use */
  penstock_welcome welcome;
  char *welcome_json;
  char *texts; /* names and dtypes of columns */
  penstock_column *columns;

  uint8_t *phases;   /* of each seat */
  uint8_t *is_added; /* of each seat, whether it has a row in the next STEP */
  uint32_t waiting;  /* seats that wait */
  uint8_t *actions;  /* a row of each seat */

  /* The next STEP. Its rows have a fixed place; what belongs before them is written when their number is known. */
  uint8_t *rows;
  size_t room; /* bytes before the rows */
  uint32_t rows_count, most_rows;
  uint32_t *row_seats;
  uint8_t *row_flags;
  float *row_rewards;

  uint8_t *received; /* bytes that have arrived, from `begin` to `end` not handled yet */
  size_t capacity, begin, end;
  char error[PENSTOCK_ERROR_NBYTES];
};

static size_t padded(size_t nbytes, size_t align) { return (nbytes + align - 1) / align * align; }

/* -- JSON ---------------------------------------------------------------------------------------------------------- */

static const char *skip_space(const char *at) {
  while (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r') at++;
  return at;
}

/* Returns the number of 4 hexadecimal digits, or -1. */
static long hex4(const char *at) {
  long number = 0;
  for (int i = 0; i < 4; i++) {
    char c = at[i];
    int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return -1;
    number = number * 16 + digit;
  }
  return number;
}

/* Copies a text as UTF-8, if there is memory for it. Returns what follows its closing quote, or NULL. */
static const char *read_text(const char *at, char *text, size_t size) {
  size_t length = 0;
  if (*at++ != '"') return NULL;
  while (*at != '"') {
    unsigned long code = (unsigned char)*at++;
    int is_unicode = 0;
    if (code < 0x20) return NULL; /* among them the end of the memory */
    if (code == '\\') {
      static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
      char escape = *at;
      const char *letter = escape ? strchr(letters, escape) : NULL;
      if (letter) {
        code = (unsigned char)meanings[letter - letters];
        at++;
      } else {
        long high = escape == 'u' ? hex4(at + 1) : -1, low = -1;
        if (high < 0) return NULL;
        at += 5;
        if (high >= 0xD800 && high < 0xDC00 && at[0] == '\\' && at[1] == 'u') low = hex4(at + 2);
        if (low >= 0xDC00 && low < 0xE000) {
          high = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
          at += 6;
        }
        code = (unsigned long)high;
        is_unicode = 1;
      }
    }

    char bytes[4];
    size_t count = 1;
    if (!is_unicode || code < 0x80) {
      bytes[0] = (char)code;
    } else {
      count = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
      for (size_t i = count - 1; i > 0; i--, code >>= 6) bytes[i] = (char)(0x80 | (code & 0x3F));
      bytes[0] = (char)((0xF00 >> count & 0xFF) | code);
    }
    if (length + count < size) {
      memcpy(text + length, bytes, count);
      length += count;
    } else {
      size = length + 1; /* nothing behind a character that was left out */
    }
  }
  if (text) text[length] = 0;
  return at + 1;
}

/* Returns what follows a value, or NULL if it is no JSON. */
static const char *json_end(const char *at, int depth) {
  if (*at == '"') return read_text(at, NULL, 0);
  if (*at == '[' || *at == '{') {
    char closing = *at == '[' ? ']' : '}';
    if (depth == MOST_DEPTH) return NULL;
    at = skip_space(at + 1);
    if (*at == closing) return at + 1;
    for (;;) {
      if (closing == '}') {
        at = read_text(at, NULL, 0);
        if (!at) return NULL;
        at = skip_space(at);
        if (*at++ != ':') return NULL;
        at = skip_space(at);
      }
      at = json_end(at, depth + 1);
      if (!at) return NULL;
      at = skip_space(at);
      if (*at == closing) return at + 1;
      if (*at++ != ',') return NULL;
      at = skip_space(at);
    }
  }
  if (!strncmp(at, "true", 4) || !strncmp(at, "null", 4)) return at + 4;
  if (!strncmp(at, "false", 5)) return at + 5;
  /* Numbers are not told from similar words, such as Infinity: what reads them checks them. */
  size_t length = strspn(at, "+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
  return length ? at + length : NULL;
}

static int is_json_object(const char *text, size_t nbytes) {
  const char *end = *text == '{' ? json_end(text, 0) : NULL;
  return end && skip_space(end) == text + nbytes;
}

const char *penstock_json_first(const char *container) {
  const char *at;
  if (!container || (*container != '[' && *container != '{')) return NULL;
  at = skip_space(container + 1);
  return *at == ']' || *at == '}' ? NULL : at;
}

const char *penstock_json_next(const char *element) {
  const char *at = element ? json_end(element, 0) : NULL;
  if (!at) return NULL;
  at = skip_space(at);
  return *at == ',' || *at == ':' ? skip_space(at + 1) : NULL;
}

const char *penstock_json_member(const char *object, const char *key) {
  size_t length = strlen(key);
  if (!object || *object != '{') return NULL;
  for (const char *at = penstock_json_first(object); at; at = penstock_json_next(at)) {
    const char *value = penstock_json_next(at);
    if (!strncmp(at + 1, key, length) && at[length + 1] == '"') return value;
    at = value;
  }
  return NULL;
}

int penstock_json_integer(const char *value, int64_t *number) {
  uint64_t size = 0;
  if (!value) return -1;
  int is_negative = *value == '-';
  const char *digits = value + is_negative, *at = digits;
  for (; *at >= '0' && *at <= '9'; at++) {
    uint64_t digit = (uint64_t)(*at - '0');
    if (size > (UINT64_MAX - digit) / 10) return -1;
    size = size * 10 + digit;
  }
  if (at == digits || at != json_end(value, 0) || size > (uint64_t)INT64_MAX + (uint64_t)is_negative) return -1;
  *number = is_negative ? -1 - (int64_t)(size - 1) : (int64_t)size;
  if (!size) *number = 0;
  return 0;
}

int penstock_json_text(const char *value, char *text, size_t size) {
  return value && size && read_text(value, text, size) ? 0 : -1;
}

/* Writes a text as JSON; returns what follows it. An escape takes 6 bytes for 1. */
static char *write_text(char *at, const char *text) {
  *at++ = '"';
  for (; *text; text++) {
    unsigned char c = (unsigned char)*text;
    if (c < 0x20 || c == '"' || c == '\\') at += sprintf(at, "\\u%04x", c);
    else *at++ = (char)c;
  }
  *at++ = '"';
  return at;
}

/* -- Sockets and time ---------------------------------------------------------------------------------------------- */

static double now_s(void) {
#ifdef _WIN32
  return (double)GetTickCount64() / 1e3;
#else
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
#endif
}

static void sleep_s(double seconds) {
#ifdef _WIN32
  Sleep((DWORD)(seconds * 1e3));
#else
  struct timespec pause;
  pause.tv_sec = (time_t)seconds;
  pause.tv_nsec = (long)((seconds - (double)pause.tv_sec) * 1e9);
  nanosleep(&pause, NULL);
#endif
}

static void set_blocking(socket_type descriptor, int is_blocking) {
#ifdef _WIN32
  u_long is_nonblocking = !is_blocking;
  ioctlsocket(descriptor, FIONBIO, &is_nonblocking);
#else
  int flags = fcntl(descriptor, F_GETFL);
  fcntl(descriptor, F_SETFL, is_blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
#endif
}

/* Returns whether something happened to a socket: it can be read, or written, or has failed. */
static int poll_socket(socket_type descriptor, short events, double seconds) {
  double deadline_s = now_s() + seconds;
  for (;;) {
    struct pollfd entry;
    double left_s = deadline_s - now_s();
    int milliseconds = left_s <= 0 ? 0 : left_s > 1e6 ? 1000000000 : (int)(left_s * 1e3) + 1;
    entry.fd = descriptor;
    entry.events = events;
    entry.revents = 0;
    int count = poll(&entry, 1, milliseconds);
    if (count >= 0 || !was_interrupted()) return count != 0;
  }
}

/* Returns a connected socket, or NO_SOCKET. */
static socket_type dial(const char *host, const char *port) {
  struct addrinfo hints, *addresses;
  socket_type descriptor = NO_SOCKET;
  memset(&hints, 0, sizeof hints);
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host, port, &hints, &addresses)) return NO_SOCKET;

  for (struct addrinfo *address = addresses; address && descriptor == NO_SOCKET; address = address->ai_next) {
    descriptor = socket(address->ai_family, address->ai_socktype, address->ai_protocol);
    if (descriptor == NO_SOCKET) continue;
    set_blocking(descriptor, 0);
    int failure = connect(descriptor, address->ai_addr, (socklen_t)address->ai_addrlen);
    if (failure && poll_socket(descriptor, POLLOUT, DIAL_S)) {
      socklen_t size = sizeof failure;
      getsockopt(descriptor, SOL_SOCKET, SO_ERROR, (char *)&failure, &size);
    }
    if (failure) {
      close_socket(descriptor);
      descriptor = NO_SOCKET;
    }
  }
  freeaddrinfo(addresses);
  if (descriptor == NO_SOCKET) return NO_SOCKET;

  int yes = 1;
  socket_timeout send_limit;
#ifdef _WIN32
  send_limit = SEND_S * 1000;
#else
  send_limit.tv_sec = SEND_S;
  send_limit.tv_usec = 0;
#endif
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, (char *)&yes, sizeof yes);
  setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, (char *)&yes, sizeof yes);
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, (char *)&send_limit, sizeof send_limit);
#ifdef SO_NOSIGPIPE
  setsockopt(descriptor, SOL_SOCKET, SO_NOSIGPIPE, (char *)&yes, sizeof yes);
#endif
  set_blocking(descriptor, 1);
  return descriptor;
}

/* Ends the connection. Returns -1. */
static int disconnect(penstock_game *game) {
  if (game->socket != NO_SOCKET) close_socket(game->socket);
  game->socket = NO_SOCKET;
  game->is_welcome = 0;
  game->waiting = game->rows_count = 0;
  memset(game->phases, PENSTOCK_IDLE, game->seats);
  memset(game->is_added, 0, game->seats);
  return -1;
}

/* Ends the connection, and notes why. Returns -1. */
static int lose(penstock_game *game, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(game->error, sizeof game->error, format, arguments);
  va_end(arguments);
  return disconnect(game);
}

static int send_all(penstock_game *game, const uint8_t *bytes, size_t nbytes) {
  while (nbytes) {
    long sent = (long)send(game->socket, (const char *)bytes, (io_size)nbytes, MSG_NOSIGNAL);
    if (sent < 0 && was_interrupted()) continue;
    if (sent <= 0) return lose(game, "the connection is lost: the service takes no more bytes");
    bytes += sent;
    nbytes -= (size_t)sent;
  }
  return 0;
}

/* Takes bytes that have arrived, or arrive within so many seconds; a negative number has no limit. Returns 1 if some
 * did, 0 if not, -1 if the connection is lost. */
static int receive_bytes(penstock_game *game, double seconds) {
  if (seconds >= 0 && !poll_socket(game->socket, POLLIN, seconds)) return 0;
  if (game->begin) {
    memmove(game->received, game->received + game->begin, game->end - game->begin);
    game->end -= game->begin;
    game->begin = 0;
  }
  long count;
  do {
    count = (long)recv(game->socket, (char *)game->received + game->end, (io_size)(game->capacity - game->end), 0);
  } while (count < 0 && was_interrupted());
  if (count <= 0) return lose(game, "the connection is lost: the service has closed it without a word");
  game->end += (size_t)count;
  return 1;
}

static uint32_t u32_at(const uint8_t *bytes) {
  uint32_t number;
  memcpy(&number, bytes, sizeof number);
  return number;
}

/* Allocates memory for `count` elements, filled with zeros, in place of `memory`. Returns NULL if there is none. */
static void *allocate_anew(void *memory, size_t count, size_t size) {
  free(memory);
  return calloc(count ? count : 1, size);
}

/* -- Messages ------------------------------------------------------------------------------------------------------ */

static int lose_to_nonsense(penstock_game *game, const char *what) {
  game->is_refused = 1;
  return lose(game, "the service sent %s; is it penstock at %s:%s?", what, game->host, game->port);
}

static int lose_for_memory(penstock_game *game) {
  game->is_refused = 1;
  return lose(game, "there is no memory for the rows of %lu seats; ask for fewer", (unsigned long)game->seats);
}

/* Finds the next message. Returns 1 if it is complete, 0 if not, -1 after losing the connection. */
static int next_message(penstock_game *game, uint8_t **message, size_t *nbytes) {
  size_t available = game->end - game->begin;
  if (available < 4) return 0;
  *nbytes = u32_at(game->received + game->begin);
  if (*nbytes < 4 || *nbytes > MOST_NBYTES) return lose_to_nonsense(game, "a message of a wrong length");
  if (*nbytes + 4 > game->capacity) { /* only WELCOME is longer than ACT and the longest FAULT */
    if (game->is_welcome) return lose_to_nonsense(game, "a message that is too long");
    uint8_t *larger = (uint8_t *)realloc(game->received, *nbytes + 5);
    if (!larger) return lose_for_memory(game);
    game->received = larger;
    game->capacity = *nbytes + 4;
  }
  *message = game->received + game->begin + 4;
  if (available - 4 < *nbytes) return 0;
  game->begin += 4 + *nbytes;
  return 1;
}

/* -- WELCOME ------------------------------------------------------------------------------------------------------- */

/* Reads a column, whose texts are put behind `*texts`. Returns 0, or -1 if it is none. */
static int read_column(const char *value, size_t row_nbytes, penstock_column *column, char **texts) {
  const char *name = penstock_json_first(value), *dtype = penstock_json_next(name);
  const char *shape = penstock_json_next(dtype), *offset = penstock_json_next(shape);
  size_t room = (size_t)(json_end(value, 0) - value);
  int64_t number;
  if (*value != '[' || !offset || *shape != '[') return -1;

  column->name = *texts;
  if (penstock_json_text(name, *texts, room)) return -1;
  *texts += strlen(*texts) + 1;
  column->dtype = *texts;
  if (penstock_json_text(dtype, *texts, room) || strlen(*texts) != 3 || !strchr("1248", column->dtype[2])) return -1;
  if (!strchr("<|", column->dtype[0]) || !strchr("fiub", column->dtype[1])) return -1;
  *texts += 4;
  column->nbytes = (size_t)(column->dtype[2] - '0');

  column->count = 1;
  column->axes = 0;
  for (const char *axis = penstock_json_first(shape); axis; axis = penstock_json_next(axis)) {
    if (column->axes == PENSTOCK_MOST_AXES || penstock_json_integer(axis, &number)) return -1;
    if (number < 0 || number > MOST_NBYTES) return -1;
    column->shape[column->axes++] = (uint32_t)number;
    if (number && column->count > row_nbytes / (size_t)number) return -1;
    column->count *= (size_t)number;
  }
  if (penstock_json_integer(offset, &number) || number < 0 || (uint64_t)number > row_nbytes) return -1;
  column->offset = (size_t)number;
  int is_aligned = column->offset % column->nbytes == 0;
  return is_aligned && column->count <= (row_nbytes - column->offset) / column->nbytes ? 0 : -1;
}

static int read_nbytes(const char *json, const char *key, size_t most, size_t *nbytes) {
  int64_t number;
  if (penstock_json_integer(penstock_json_member(json, key), &number)) return -1;
  if (number < 0 || (uint64_t)number > most || number % 8) return -1;
  *nbytes = (size_t)number;
  return 0;
}

/* Allocates what steps need. Returns 0, or -1 after losing the connection. */
static int allocate_rows(penstock_game *game) {
  size_t row_nbytes = game->welcome.row_nbytes, head_nbytes = padded(64 + 9 * (size_t)game->seats, 8);
  /* A STEP has fewer rows than the game has seats if they are large. */
  size_t fitting = row_nbytes ? (MOST_NBYTES - head_nbytes) / row_nbytes : game->seats;
  game->most_rows = fitting < game->seats ? (uint32_t)fitting : game->seats;
  game->room = head_nbytes;
  game->rows = (uint8_t *)allocate_anew(game->rows, game->room + game->most_rows * row_nbytes, 1);
  game->actions = (uint8_t *)allocate_anew(game->actions, game->seats, game->welcome.action_nbytes);

  size_t largest_act = padded(12 + 4 * (size_t)game->seats, 8) + game->seats * game->welcome.action_nbytes;
  if (largest_act > game->capacity) {
    uint8_t *larger = (uint8_t *)realloc(game->received, largest_act + 1);
    if (!larger) return lose_for_memory(game);
    game->received = larger;
    game->capacity = largest_act;
  }
  return game->rows && game->actions ? 0 : lose_for_memory(game);
}

/* Reads a WELCOME. Returns 0, or -1 after losing the connection. */
static int handle_welcome(penstock_game *game, const char *json) {
  static const char misfit[] = "a WELCOME that does not fit";
  penstock_welcome *welcome = &game->welcome;
  size_t length = strlen(json) + 1, count = 0;
  int64_t seats;
  game->welcome_json = (char *)allocate_anew(game->welcome_json, length, 1);
  game->texts = (char *)allocate_anew(game->texts, length, 1);
  if (!game->welcome_json || !game->texts) return lose_for_memory(game);
  welcome->json = (char *)memcpy(game->welcome_json, json, length);

  const char *row = penstock_json_member(welcome->json, "row");
  const char *action = penstock_json_first(penstock_json_member(welcome->json, "action_row"));
  const char *learns = penstock_json_member(welcome->json, "learns");
  if (!row || *row != '[' || !action) return lose_to_nonsense(game, misfit);
  if (read_nbytes(welcome->json, "row_nbytes", MOST_NBYTES / 2, &welcome->row_nbytes) ||
      read_nbytes(welcome->json, "action_nbytes", MOST_NBYTES / game->seats, &welcome->action_nbytes) ||
      penstock_json_integer(penstock_json_member(welcome->json, "seats"), &seats) || seats != (int64_t)game->seats)
    return lose_to_nonsense(game, misfit);

  for (const char *at = penstock_json_first(row); at; at = penstock_json_next(at)) count++;
  game->columns = (penstock_column *)allocate_anew(game->columns, count, sizeof *game->columns);
  if (!game->columns) return lose_for_memory(game);
  char *texts = game->texts;
  penstock_column *column = game->columns;
  for (const char *at = penstock_json_first(row); at; at = penstock_json_next(at))
    if (read_column(at, welcome->row_nbytes, column++, &texts)) return lose_to_nonsense(game, misfit);
  if (read_column(action, welcome->action_nbytes, &welcome->action, &texts)) return lose_to_nonsense(game, misfit);
  welcome->columns = game->columns;
  welcome->columns_count = count;
  welcome->seats = game->seats;
  welcome->learns = learns && *learns == 't';
  if (allocate_rows(game)) return -1;
  game->is_welcome = 1;
  game->waiting = 0;
  return 0;
}

/* -- What arrives -------------------------------------------------------------------------------------------------- */

static int handle_act(penstock_game *game, const uint8_t *message, size_t nbytes) {
  size_t row_nbytes = game->welcome.action_nbytes;
  uint32_t count = nbytes >= 8 ? u32_at(message + 4) : 0;
  if (!game->is_welcome || !count || count > game->seats || nbytes != padded(8 + 4 * (size_t)count, 8) + count * row_nbytes)
    return lose_to_nonsense(game, "an ACT of a wrong length");

  const uint8_t *action = message + padded(8 + 4 * (size_t)count, 8);
  for (uint32_t i = 0; i < count; i++, action += row_nbytes) {
    uint32_t seat = u32_at(message + 8 + 4 * (size_t)i);
    if (seat >= game->seats) return lose_to_nonsense(game, "an ACT of a seat that there is not");
    if (game->phases[seat] != PENSTOCK_WAITS) continue; /* it was at fault meanwhile */
    memcpy(game->actions + seat * row_nbytes, action, row_nbytes);
    game->phases[seat] = PENSTOCK_ACTS;
    game->waiting--;
  }
  return 0;
}

static int handle_fault(penstock_game *game, const char *json, const char *sentence) {
  char field[16] = "";
  int64_t seat;
  if (penstock_json_integer(penstock_json_member(json, "seat"), &seat)) {
    penstock_json_text(penstock_json_member(json, "field"), field, sizeof field);
    /* Room is made when others leave, among them this game's own last connection. */
    game->is_refused = strcmp(field, "connection") && strcmp(field, "seats");
    return lose(game, "%s", sentence);
  }
  snprintf(game->error, sizeof game->error, "seat %ld: %s", (long)seat, sentence);
  if (seat < 0 || seat >= (int64_t)game->seats) return 0;
  if (game->phases[seat] == PENSTOCK_WAITS) game->waiting--;
  game->phases[seat] = PENSTOCK_AT_FAULT;
  return 0;
}

/* Handles a message of JSON that ends by a 0. */
static int handle_json(penstock_game *game, uint32_t kind, const char *json, size_t nbytes) {
  char sentence[PENSTOCK_ERROR_NBYTES - 64];
  if (!is_json_object(json, nbytes)) return lose_to_nonsense(game, "what is no message of a service");
  if (kind == WELCOME && !game->is_welcome) return handle_welcome(game, json);
  const char *reason = penstock_json_member(json, kind == END ? "reason" : "error");
  if ((kind != END && kind != FAULT) || penstock_json_text(reason, sentence, sizeof sentence))
    return lose_to_nonsense(game, "what is no message of a service");
  if (kind == FAULT) return handle_fault(game, json, sentence);
  return lose(game, "the service has ended the connection: %s", sentence);
}

/* Handles all messages that are complete. Returns 0, or -1 if the connection is lost. */
static int handle_messages(penstock_game *game) {
  for (;;) {
    uint8_t *message = NULL;
    size_t nbytes = 0;
    int status = next_message(game, &message, &nbytes);
    if (status <= 0) return status;
    uint32_t kind = u32_at(message);
    if (kind == ACT) {
      status = handle_act(game, message, nbytes);
    } else {
      /* The byte behind the message makes room for the 0 at the end of its text. */
      uint8_t behind = message[nbytes];
      message[nbytes] = 0;
      status = handle_json(game, kind, (char *)message + 4, nbytes - 4);
      game->received[game->begin] = behind;
    }
    if (status) return status;
  }
}

/* -- Connecting ---------------------------------------------------------------------------------------------------- */

/* Connects once. Returns 0, or -1. */
static int connect_once(penstock_game *game) {
  game->is_refused = 0;
  game->begin = game->end = 0;
  game->socket = dial(game->host, game->port);
  if (game->socket == NO_SOCKET)
    return lose(game, "nobody answers at %s:%s; start penstock serve or serve-env there", game->host, game->port);
  game->waiting = 1;
  if (send_all(game, game->hello, game->hello_nbytes)) return -1;
  int waiting = penstock_wait(game, game->patience_s > ANSWER_S ? game->patience_s : ANSWER_S);
  if (waiting > 0) lose(game, "HELLO is not answered at %s:%s; is it penstock serve?", game->host, game->port);
  return waiting ? -1 : 0;
}

int penstock_reconnect(penstock_game *game) {
  double deadline_s = now_s() + game->patience_s, pause_s = FIRST_PAUSE_S;
  disconnect(game);
  for (;;) {
    if (!connect_once(game)) return 0;
    if (game->is_refused || now_s() + pause_s > deadline_s) return -1;
    sleep_s(pause_s);
    pause_s = pause_s * 2 < LONGEST_PAUSE_S ? pause_s * 2 : LONGEST_PAUSE_S;
  }
}

/* Writes HELLO. Returns 0, or -1 if there is no memory. */
static int write_hello(penstock_game *game, const penstock_options *options) {
  const char *texts[] = {options->token, options->name}, *keys[] = {"token", "name"};
  const char *spaces[] = {options->observation, options->action}, *space_keys[] = {"observation", "action"};
  size_t most = 128;
  for (int i = 0; i < 2; i++) most += 32 + (texts[i] ? 6 * strlen(texts[i]) : 0) + (spaces[i] ? strlen(spaces[i]) : 0);
  game->hello = (uint8_t *)calloc(most, 1);
  if (!game->hello) return -1;

  char *at = (char *)game->hello + 8;
  at += sprintf(at, "{\"protocol\": %d, \"seats\": %lu", PROTOCOL, (unsigned long)game->seats);
  for (int i = 0; i < 2; i++) {
    if (texts[i]) at = write_text(at + sprintf(at, ", \"%s\": ", keys[i]), texts[i]);
    if (spaces[i]) at += sprintf(at, ", \"%s\": %s", space_keys[i], spaces[i]);
  }
  *at++ = '}';
  game->hello_nbytes = (size_t)(at - (char *)game->hello);
  uint32_t head[2];
  head[0] = (uint32_t)(game->hello_nbytes - 4);
  head[1] = HELLO;
  memcpy(game->hello, head, sizeof head);
  return 0;
}

penstock_game *penstock_connect(const penstock_options *options, char error[PENSTOCK_ERROR_NBYTES]) {
  const char *host = options->host ? options->host : "127.0.0.1";
  const char *spaces[] = {options->observation, options->action};
  for (int i = 0; i < 2; i++) {
    if (spaces[i] && !is_json_object(spaces[i], strlen(spaces[i]))) {
      snprintf(error, PENSTOCK_ERROR_NBYTES, "%s", "a space of the game is no JSON object, as {\"Discrete\": [2, 0]} is one");
      return NULL;
    }
  }
#ifdef _WIN32
  WSADATA about;
  if (WSAStartup(MAKEWORD(2, 2), &about)) {
    snprintf(error, PENSTOCK_ERROR_NBYTES, "%s", "Winsock does not start");
    return NULL;
  }
#endif

  penstock_game *game = (penstock_game *)calloc(1, sizeof *game);
  if (!game) {
    snprintf(error, PENSTOCK_ERROR_NBYTES, "%s", "there is no memory for a game");
    return NULL;
  }
  game->socket = NO_SOCKET;
  game->seats = options->seats ? options->seats : 1;
  game->patience_s = options->patience_s;
  game->capacity = LEAST_BUFFER;
  game->host = (char *)calloc(strlen(host) + 1, 1);
  game->received = (uint8_t *)calloc(game->capacity + 1, 1);
  game->phases = (uint8_t *)calloc(game->seats, 1);
  game->is_added = (uint8_t *)calloc(game->seats, 1);
  game->row_seats = (uint32_t *)calloc(game->seats, sizeof(uint32_t));
  game->row_flags = (uint8_t *)calloc(game->seats, 1);
  game->row_rewards = (float *)calloc(game->seats, sizeof(float));
  int has_memory = game->host && game->received && game->phases && game->is_added && game->row_seats &&
                   game->row_flags && game->row_rewards && !write_hello(game, options);
  if (has_memory) {
    strcpy(game->host, host);
    snprintf(game->port, sizeof game->port, "%u", options->port ? options->port : (unsigned)DEFAULT_PORT);
    if (!penstock_reconnect(game)) return game;
  } else {
    lose(game, "there is no memory for %u seats; ask for fewer", (unsigned)game->seats);
  }
  memcpy(error, game->error, PENSTOCK_ERROR_NBYTES);
  penstock_close(game);
  return NULL;
}

void penstock_close(penstock_game *game) {
  if (!game) return;
  if (game->socket != NO_SOCKET) {
    static const char reason[] = "{\"reason\": \"the game is over\"}";
    uint8_t message[8 + sizeof reason - 1];
    uint32_t head[2] = {(uint32_t)sizeof message - 4, END};
    memcpy(message, head, sizeof head);
    memcpy(message + 8, reason, sizeof reason - 1);
    /* A socket that is closed with bytes to read resets the connection, and the last rows could be lost with it. */
    if (!send_all(game, message, sizeof message) && !shutdown(game->socket, SHUT_WR)) {
      double deadline_s = now_s() + FAREWELL_S;
      do game->begin = game->end = 0;
      while (now_s() < deadline_s && receive_bytes(game, deadline_s - now_s()) > 0);
    }
    lose(game, "the game has left");
  }
  void *memory[] = {game->host, game->hello, game->welcome_json, game->texts, game->columns, game->phases,
                    game->is_added, game->actions, game->rows, game->row_seats, game->row_flags, game->row_rewards,
                    game->received, game};
  for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) free(memory[i]);
#ifdef _WIN32
  WSACleanup();
#endif
}

/* -- Steps --------------------------------------------------------------------------------------------------------- */

int penstock_is_connected(const penstock_game *game) { return game->socket != NO_SOCKET; }

const penstock_welcome *penstock_welcome_of(const penstock_game *game) { return &game->welcome; }

const penstock_column *penstock_find_column(const penstock_game *game, const char *name) {
  for (size_t i = 0; i < game->welcome.columns_count; i++)
    if (!strcmp(game->columns[i].name, name)) return &game->columns[i];
  return NULL;
}

uint8_t *penstock_row(penstock_game *game, uint32_t seat, unsigned flags, float reward) {
  const char *mistake = NULL;
  if (game->socket == NO_SOCKET) return NULL;
  if (seat >= game->seats) mistake = "there is no such seat; ask for more while connecting";
  else if (game->phases[seat] == PENSTOCK_WAITS) mistake = "it waits for its action; call penstock_wait";
  else if (game->is_added[seat]) mistake = "it has a row in this STEP already; call penstock_step";
  else if (game->rows_count == game->most_rows) mistake = "the STEP is full; call penstock_send";
  if (mistake) {
    snprintf(game->error, sizeof game->error, "seat %lu: %s", (unsigned long)seat, mistake);
    return NULL;
  }

  size_t row_nbytes = game->welcome.row_nbytes;
  uint32_t i = game->rows_count++;
  game->is_added[seat] = 1;
  game->row_seats[i] = seat;
  game->row_flags[i] = (uint8_t)flags;
  game->row_rewards[i] = reward;
  return (uint8_t *)memset(game->rows + game->room + i * row_nbytes, 0, row_nbytes);
}

int penstock_send(penstock_game *game) {
  uint32_t count = game->rows_count;
  if (game->socket == NO_SOCKET) return -1;
  if (!count) return 0;

  size_t flags_at = 8 + 4 * (size_t)count, rewards_at = padded(flags_at + count, 4);
  size_t rows_at = padded(rewards_at + 4 * (size_t)count, 8);
  size_t nbytes = rows_at + count * game->welcome.row_nbytes;
  uint8_t *message = game->rows + game->room - rows_at; /* behind its length */
  uint32_t head[3];
  head[0] = (uint32_t)nbytes;
  head[1] = STEP;
  head[2] = count;
  memset(message, 0, rows_at);
  memcpy(message - 4, head, sizeof head);
  memcpy(message + 8, game->row_seats, 4 * (size_t)count);
  memcpy(message + flags_at, game->row_flags, count);
  memcpy(message + rewards_at, game->row_rewards, 4 * (size_t)count);

  for (uint32_t i = 0; i < count; i++) {
    uint32_t seat = game->row_seats[i];
    int has_ended = game->row_flags[i] & (PENSTOCK_TERMINATED | PENSTOCK_TRUNCATED | PENSTOCK_LEAVES);
    game->is_added[seat] = 0;
    game->phases[seat] = has_ended ? PENSTOCK_IDLE : PENSTOCK_WAITS;
    game->waiting += !has_ended;
  }
  game->rows_count = 0;
  return send_all(game, message - 4, nbytes + 4);
}

int penstock_wait(penstock_game *game, double seconds) {
  double deadline_s = seconds > 0 ? now_s() + seconds : 0;
  if (game->socket == NO_SOCKET) return -1;
  /* Without a seat that waits, only what has arrived is looked at: a FAULT of a row that ended, or END. */
  if (!game->waiting && receive_bytes(game, 0) < 0) return -1;
  for (;;) {
    if (handle_messages(game) < 0) return -1;
    if (!game->waiting) return 0;
    double left_s = seconds > 0 ? deadline_s - now_s() : seconds;
    if (seconds > 0 && left_s < 0) left_s = 0;
    int status = receive_bytes(game, left_s);
    if (status <= 0) return status < 0 ? -1 : (int)game->waiting;
  }
}

int penstock_step(penstock_game *game) { return penstock_send(game) ? -1 : penstock_wait(game, -1); }

penstock_phase penstock_phase_of(const penstock_game *game, uint32_t seat) {
  return seat < game->seats ? (penstock_phase)game->phases[seat] : PENSTOCK_IDLE;
}

const uint8_t *penstock_action(const penstock_game *game, uint32_t seat) {
  int has_action = seat < game->seats && game->phases[seat] == PENSTOCK_ACTS;
  return has_action ? game->actions + seat * game->welcome.action_nbytes : NULL;
}

const char *penstock_error(const penstock_game *game) { return game->error; }
