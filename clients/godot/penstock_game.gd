# A game's end of `penstock serve-env` and `penstock serve`, for Godot 3 (docs/games-protocol.md).
#
#   const PenstockGame = preload("penstock_game.gd")
#   var penstock = PenstockGame.new()
#
#   func _ready():
#       penstock.open("127.0.0.1", 8900, {"seats": 1})
#
#   func _physics_process(_delta):
#       if not penstock.poll():
#           return                                   # no service yet; poll goes on trying
#       if penstock.is_idle(0):                      # an episode begins
#           penstock.write(0, see(), PenstockGame.FIRST)
#       elif penstock.has_action(0):
#           move(penstock.action_of(0))
#           penstock.write(0, see(), 0, reward)      # or TERMINATED, TRUNCATED in the last row
#       penstock.send()
#
# Nothing here blocks but `wait`. A seat is idle, waits for its action, or has it. All seats are idle again after a lost
# connection, and one is after a fault: begin a new episode then.
extends Reference

# A service has answered: its WELCOME is in `welcome`, and all seats are idle.
signal welcomed()
# What a seat sent cannot be used. The seat is idle; the others go on.
signal faulted(seat, field, error)
# The connection has ended. `poll` tries again, after pauses that grow to 5 s.
signal lost(reason)
# The service does not take this game: another token, other spaces. `poll` does not try again.
signal refused(field, error)

# Flags of a row: the seat begins an episode; it has ended; it was cut off; the seat is gone.
const FIRST = 1
const TERMINATED = 2
const TRUNCATED = 4
const LEAVES = 8

const _ENDED = TERMINATED | TRUNCATED | LEAVES
const _PROTOCOL = 1
const _MOST_NBYTES = 16 * 1024 * 1024
const _SHORTEST_PAUSE_MS = 100
const _LONGEST_PAUSE_MS = 5000
const _WELCOME_MS = 10000  # the time in which a service answers
const _DTYPES = ["f4", "f8", "i1", "u1", "b1", "i2", "u2", "i4", "u4", "i8", "u8"]

enum _Kind {HELLO = 1, WELCOME, STEP, ACT, FAULT, END}
enum _Seat {IDLE, WAITING, ACTING}

# The content of WELCOME; null while no service has answered.
var welcome = null
# Seats 0 to seats - 1 play.
var seats = 1

var _host = ""
var _port = 0
var _hello = {}
var _tcp = StreamPeerTCP.new()
var _is_open = false  # whether `poll` connects
var _is_greeted = false  # whether HELLO was sent
var _pause_ms = 0  # before the next attempt
var _next_ms = 0  # when it is due; while HELLO is not answered, when that has to be
var _inbox = PoolByteArray()  # the beginning of a message
var _seat_states = []
var _action_rows = []  # of each seat, as bytes
var _waiting = 0  # seats that wait
var _columns = []  # of an observation
var _action_column = null
var _action_reader = StreamPeerBuffer.new()
var _empty_row = PoolByteArray()
# The rows of the next STEP.
var _step_seats = []
var _step_flags = PoolByteArray()
var _step_rewards = []
var _step_rows = StreamPeerBuffer.new()


class _Column:
	var name = ""
	var dtype = ""  # as numpy's, without the order of bytes
	var offset = 0
	var size = 1  # numbers
	var is_single = false  # a number rather than an array

	func _init(encoded):
		name = encoded[0]
		dtype = encoded[1].substr(1)
		for axis in encoded[2]:
			size *= int(axis)
		is_single = encoded[2].empty()
		offset = int(encoded[3])


# Begin to connect; `poll` goes on with it. Options are the fields of HELLO: `seats` (1), `token`, `name`, and the spaces
# `observation` and `action` as the protocol writes them, which are needed where a service does not know them.
func open(host, port, options = {}):
	_host = host
	_port = int(port)
	seats = int(options.get("seats", 1))
	_hello = {"protocol": _PROTOCOL}
	for key in options:
		_hello[key] = options[key]
	_is_open = true
	_pause_ms = _SHORTEST_PAUSE_MS
	_dial()


# Leave. All seats are gone; `open` may be called again.
func close(reason = "the game is over"):
	if welcome != null:
		_send_json(_Kind.END, {"reason": reason})
	_is_open = false
	_disconnect()


# Handle what has arrived, and connect where there is no connection. Returns whether the game may play.
func poll():
	if not _is_open:
		return false

	var status = _tcp.get_status()
	if status == StreamPeerTCP.STATUS_CONNECTED:
		if not _is_greeted:
			_is_greeted = true
			_tcp.set_no_delay(true)
			_send_json(_Kind.HELLO, _hello)
		_receive()
	elif _is_greeted and status != StreamPeerTCP.STATUS_CONNECTING:
		_lose("the connection was lost")
	elif status == StreamPeerTCP.STATUS_ERROR:
		_lose("nobody serves at %s:%d; start penstock serve or serve-env there" % [_host, _port])
	elif status == StreamPeerTCP.STATUS_NONE and OS.get_ticks_msec() >= _next_ms:
		_dial()

	if welcome == null and _is_open and status != StreamPeerTCP.STATUS_NONE and OS.get_ticks_msec() >= _next_ms:
		_lose("%s:%d does not answer; is it penstock serve-env?" % [_host, _port])
	return welcome != null


# Wait until no seat waits for its action or the connection is lost, at most so many seconds. For training without a
# display, where the game has nothing else to do. Returns whether the game may play.
func wait(longest_s = INF):
	var ends_ms = OS.get_ticks_msec() + 1000 * longest_s
	while poll() and _waiting > 0 and OS.get_ticks_msec() < ends_ms:
		OS.delay_usec(10)
	return welcome != null


# Whether the seat is in no episode.
func is_idle(seat):
	return _seat_states[seat] == _Seat.IDLE


# Whether the action for the seat's last row has arrived. It stays until the next row is written.
func has_action(seat):
	return _seat_states[seat] == _Seat.ACTING


# The last action of the seat: a number if it is a single one, otherwise an array of numbers.
func action_of(seat):
	_action_reader.data_array = _action_rows[seat]
	var values = _read_values(_action_column, _action_reader)
	return values[0] if _action_column.is_single else values


# The same as it came: the bytes of its row.
func action_bytes(seat):
	return _action_rows[seat]


# Add a row to the next STEP: what the seat sees, and what its last action brought.
#
# The observation is a number or an array of numbers in the order of C; a Dictionary of them by the names of the
# columns if there are several. Returns whether the row was written; an error says why not.
func write(seat, observation, flags = 0, reward = 0.0):
	if welcome == null:
		return _error("there is no connection; write rows where poll returns true")
	var begins = flags & FIRST != 0
	if _seat_states[seat] == _Seat.WAITING:
		return _error("seat %d waits for its action; write its row when has_action says so" % seat)
	if _seat_states[seat] == _Seat.IDLE and not begins:
		return _error("seat %d is in no episode; begin one by a row with FIRST" % seat)
	var values = _values(observation)
	if values == null:
		return false

	# A STEP has one row of a seat. One that ends an episode and begins the next needs two.
	if _step_seats.has(seat):
		send()
	_step_seats.append(seat)
	_step_flags.append(flags)
	_step_rewards.append(reward)
	var start = _step_rows.get_size()
	_step_rows.seek(start)
	_step_rows.put_data(_empty_row)
	for i in _columns.size():
		_step_rows.seek(start + _columns[i].offset)
		_write_values(_columns[i].dtype, values[i])

	if flags & _ENDED:
		_seat_states[seat] = _Seat.IDLE
	else:
		_seat_states[seat] = _Seat.WAITING
		_waiting += 1
	return true


# Send the rows that were written.
func send():
	var count = _step_seats.size()
	if count == 0 or welcome == null:
		return
	var message = StreamPeerBuffer.new()
	message.put_u32(0)
	message.put_u32(_Kind.STEP)
	message.put_u32(count)
	for seat in _step_seats:
		message.put_u32(seat)
	message.put_data(_step_flags)
	_pad(message, 4)
	for reward in _step_rewards:
		message.put_float(reward)
	_pad(message, 8)
	message.put_data(_step_rows.data_array)
	_clear_step()
	_send(message)


func _dial():
	_next_ms = OS.get_ticks_msec() + _WELCOME_MS
	# Where the address cannot be used at all, the status is that of an error.
	var failed = _tcp.connect_to_host(_host, _port)
	if failed != OK:
		_lose("%s:%d cannot be reached; give the address of penstock serve-env" % [_host, _port])


func _disconnect():
	_tcp.disconnect_from_host()
	_is_greeted = false
	welcome = null
	_inbox = PoolByteArray()
	_waiting = 0
	_clear_step()


func _lose(reason):
	_disconnect()
	_next_ms = OS.get_ticks_msec() + _pause_ms
	_pause_ms = int(min(2 * _pause_ms, _LONGEST_PAUSE_MS))
	emit_signal("lost", reason)


func _clear_step():
	_step_seats = []
	_step_flags = PoolByteArray()
	_step_rewards = []
	_step_rows = StreamPeerBuffer.new()


func _receive():
	var available = _tcp.get_available_bytes()
	if available <= 0:
		return
	var arrived = _tcp.get_partial_data(available)
	_inbox.append_array(arrived[1])

	var reader = StreamPeerBuffer.new()
	reader.data_array = _inbox
	var total = _inbox.size()
	var position = 0
	while total - position >= 8:
		reader.seek(position)
		var nbytes = reader.get_u32()
		if nbytes < 4 or nbytes > _MOST_NBYTES:
			return _lose("a message says it has %d bytes; is it penstock serve-env?" % nbytes)
		if total - position < 4 + nbytes:
			break
		_handle(reader.get_u32(), reader, nbytes - 4)
		if not _is_greeted:
			return  # lost or refused meanwhile
		position += 4 + nbytes
	if position > 0:
		_inbox = _inbox.subarray(position, total - 1) if position < total else PoolByteArray()


func _handle(kind, reader, nbytes):
	if kind == _Kind.ACT and welcome != null:
		return _take_act(reader)
	var content = JSON.parse(reader.get_utf8_string(nbytes)).result
	if not content is Dictionary:
		return _lose("a message of kind %d cannot be read; is it penstock serve-env?" % kind)
	match kind:
		_Kind.WELCOME:
			_take_welcome(content)
		_Kind.FAULT:
			_take_fault(content)
		_Kind.END:
			_lose(content.get("reason", ""))


func _take_welcome(content):
	_columns = []
	for encoded in content["row"]:
		_columns.append(_Column.new(encoded))
	_action_column = _Column.new(content["action_row"][0])
	for column in _columns + [_action_column]:
		if not _DTYPES.has(column.dtype):
			return _refuse("observation", "%s has the dtype %s, which this client cannot write" % [column.name, column.dtype])

	_empty_row = PoolByteArray()
	for _i in int(content["row_nbytes"]):
		_empty_row.append(0)
	_seat_states = []
	_action_rows = []
	for _seat in seats:
		_seat_states.append(_Seat.IDLE)
		_action_rows.append(PoolByteArray())
	_waiting = 0
	_pause_ms = _SHORTEST_PAUSE_MS
	welcome = content
	emit_signal("welcomed")


func _take_act(reader):
	var bytes = reader.data_array
	var count = reader.get_u32()
	var acting = []
	for _i in count:
		acting.append(reader.get_u32())
	if count % 2:
		reader.get_u32()  # up to a multiple of 8 bytes from the kind on
	var start = reader.get_position()
	var row_nbytes = int(welcome["action_nbytes"])
	for i in count:
		var seat = acting[i]
		# A seat that does not wait was at fault, or has begun anew.
		if _seat_states[seat] != _Seat.WAITING:
			continue
		var row = start + i * row_nbytes
		_action_rows[seat] = bytes.subarray(row, row + row_nbytes - 1)
		_seat_states[seat] = _Seat.ACTING
		_waiting -= 1


func _take_fault(content):
	if content["seat"] == null:
		if content["field"] == "connection":  # there may be room later
			return _lose(content["error"])
		return _refuse(content["field"], content["error"])
	var seat = int(content["seat"])
	if _seat_states[seat] == _Seat.WAITING:
		_waiting -= 1
	_seat_states[seat] = _Seat.IDLE
	emit_signal("faulted", seat, content["field"], content["error"])


func _refuse(field, error):
	_is_open = false
	_disconnect()
	emit_signal("refused", field, error)


# Returns the values of each column, arrays of the right sizes; null after an error.
func _values(observation):
	var values = []
	for column in _columns:
		var value = observation
		if observation is Dictionary:
			if not observation.has(column.name):
				_error("the observation has no %s; see row in the welcome" % column.name)
				return null
			value = observation[column.name]
		if column.is_single and (value is int or value is float or value is bool):
			value = [value]
		if value.size() != column.size:
			_error("%s has %d numbers where %d belong" % [column.name, value.size(), column.size])
			return null
		values.append(value)
	return values


func _write_values(dtype, values):
	if values is PoolByteArray:
		_step_rows.put_data(values)
		return
	match dtype:
		"f4":
			for value in values:
				_step_rows.put_float(value)
		"f8":
			for value in values:
				_step_rows.put_double(value)
		"u1", "b1", "i1":
			for value in values:
				_step_rows.put_8(value)
		"i2", "u2":
			for value in values:
				_step_rows.put_16(value)
		"i4", "u4":
			for value in values:
				_step_rows.put_32(value)
		"i8", "u8":
			for value in values:
				_step_rows.put_64(value)


func _read_values(column, reader):
	var values = []
	reader.seek(column.offset)
	for _i in column.size:
		match column.dtype:
			"f4":
				values.append(reader.get_float())
			"f8":
				values.append(reader.get_double())
			"i1":
				values.append(reader.get_8())
			"u1", "b1":
				values.append(reader.get_u8())
			"i2":
				values.append(reader.get_16())
			"u2":
				values.append(reader.get_u16())
			"i4":
				values.append(reader.get_32())
			"u4":
				values.append(reader.get_u32())
			"i8", "u8":
				values.append(reader.get_64())
	return values


func _pad(message, to):
	# Padding is counted from the kind, which follows 4 bytes of length.
	while (message.get_size() - 4) % to != 0:
		message.put_8(0)


func _send_json(kind, content):
	var message = StreamPeerBuffer.new()
	message.put_u32(0)
	message.put_u32(kind)
	message.put_data(JSON.print(content).to_utf8())
	_send(message)


# Send a message, whose first four bytes are for its length.
func _send(message):
	message.seek(0)
	message.put_u32(message.get_size() - 4)
	# A connection that has broken is noticed by the next `poll`.
	var _failed = _tcp.put_data(message.data_array)


func _error(text):
	push_error(text)
	return false
