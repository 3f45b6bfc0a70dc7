# Many tables of Juggle, each a seat of one connection to `penstock serve-env`, which learns, or `penstock serve`.
#
#   godot3-server --fixed-fps 60 --path examples/godot_game --port=8900 --tables=16
#
# With --fixed-fps the engine's clock goes as fast as it can, and each tick of the physics is 1/60 s of the game.
# With a display, `godot3 --path examples/godot_game --port=8800` plays in real time.
extends Node2D

# A game of its own has a copy of this file.
const PenstockGame = preload("res://penstock_game.gd")
const Table = preload("res://table.gd")

const TICKS_PER_STEP = 4  # between two decisions
const OBSERVATION = {"Box": [-4, 4, [6], "<f4"]}
const ACTION = {"Discrete": [3, 0]}
const REPORT_EPISODES = 100
const GIVE_UP_MS = 60000  # a game without a display ends when nobody has served it for so long
const COLUMNS = 4

var penstock = PenstockGame.new()
var tables = []
var is_training = OS.has_feature("Server")
var options = {"host": "127.0.0.1", "port": "8900", "tables": "16"}
var ticks = 0
var returns = []
var served_ms = OS.get_ticks_msec()


func _ready():
	randomize()
	for word in OS.get_cmdline_args():
		var parts = word.lstrip("-").split("=")
		if parts.size() == 2 and options.has(parts[0]):
			options[parts[0]] = parts[1]
	for i in int(options["tables"]):
		var table = Table.new()
		table.position = Vector2(130 + 255 * (i % COLUMNS), 150 + 155 * (i / COLUMNS))
		add_child(table)
		tables.append(table)

	var _ok = penstock.connect("faulted", self, "_on_faulted")
	_ok = penstock.connect("lost", self, "_on_lost")
	_ok = penstock.connect("refused", self, "_on_refused")
	penstock.open(options["host"], int(options["port"]), {
		"seats": tables.size(), "token": OS.get_environment("PENSTOCK_TOKEN"), "name": "Juggle",
		"observation": OBSERVATION, "action": ACTION,
	})
	if is_training:
		# Without a display the engine would sleep after each frame.
		OS.low_processor_usage_mode_sleep_usec = 1


func _physics_process(delta):
	for table in tables:
		table.tick(delta)
	ticks += 1
	if ticks % TICKS_PER_STEP == 0:
		_decide()


# Tell what the tables show, and take the actions that have arrived.
func _decide():
	if not penstock.poll():
		if is_training and OS.get_ticks_msec() - served_ms > GIVE_UP_MS:
			print("nobody serves; the game ends")
			get_tree().quit(1)
		OS.delay_msec(10)
		return
	served_ms = OS.get_ticks_msec()

	for seat in tables.size():
		var table = tables[seat]
		if penstock.is_idle(seat):
			table.begin()
			penstock.write(seat, table.observe(), PenstockGame.FIRST)
		elif penstock.has_action(seat):
			var flags = PenstockGame.TERMINATED if table.is_over() else 0
			penstock.write(seat, table.observe(), flags, table.take_reward())
			if flags:
				_count(table.bounces)
	penstock.send()

	# A game that is watched goes on meanwhile; its tables keep their last actions.
	if is_training:
		penstock.wait()
	for seat in tables.size():
		if penstock.has_action(seat):
			tables[seat].action = penstock.action_of(seat)


func _count(bounces):
	returns.append(bounces)
	if returns.size() < REPORT_EPISODES:
		return
	var sum = 0
	for value in returns:
		sum += value
	print("%.2f bounces of %d, the mean of %d episodes" % [float(sum) / returns.size(), Table.MOST_BOUNCES, returns.size()])
	returns = []


func _on_faulted(seat, field, error):
	print("table %d: %s: %s" % [seat, field, error])


func _on_lost(reason):
	print(reason)


func _on_refused(field, error):
	print("%s: %s" % [field, error])
	get_tree().quit(2)
